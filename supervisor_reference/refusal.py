"""Telling the gateway that the backend refused to attach (isolation contract 4.3 and 7, U1 and U2).

The gateway learns the fact with the accepted generation and a flag; the backend's words go to the policy revision that
this start wrote, else into the sandbox's log as an ERROR line. Each is one bounded attempt, and none of them may hide
the refusal itself.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from openshell.verdicts import clean_text
from supervisor_reference.errors import GatewayError
from supervisor_reference.gateway import AdmissionReport, AdmissionState

if TYPE_CHECKING:
    from openshell.isolation.errors import BackendError
    from supervisor_reference.admission import Admitted
    from supervisor_reference.gateway import Gateway

_log = logging.getLogger(__name__)

_MAX_LINE_BYTES: Final = 1024


def refusal_line(backend_name: str, error: BackendError) -> str:
    """Return the refusal as it is stored: whose it is, then the backend's own words."""
    return clean_text(
        f"isolation backend '{backend_name}' refused attachment: {error.message}", max_bytes=_MAX_LINE_BYTES
    )


async def report_attach_refusal(gateway: Gateway, admitted: Admitted, line: str) -> None:
    """Report a refusal; never raises an error of the gateway.

    Args:
        gateway: The gateway.
        admitted: The configuration that was refused.
        line: The refusal, see `refusal_line`.
    """
    _log.error("%s", line)
    report = AdmissionReport(
        state=AdmissionState.REJECTED,
        generation=admitted.generation,
        expected_instance_id=admitted.expected_instance_id,
        error=line,
        refused_before_start=True,
    )
    try:
        await gateway.report_refusal(report)
    except GatewayError as error:
        _log.warning("the refusal could not be reported: %s", error.reason)
    try:
        if admitted.written_version is not None:
            await gateway.report_policy_failed(admitted.written_version, line)
        else:
            await gateway.push_error_line(line)
    except GatewayError as error:
        _log.warning("the backend's words could not be delivered: %s", error.reason)
