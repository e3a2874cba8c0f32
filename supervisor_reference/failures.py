"""From an error of a peer to the failure of a stage: how far, whose turn, and what may be said in public.

A backend's own words never become public here (isolation contract 7, U3.2): the public text is ours and names what
the owner of the sandbox can act on, the private text holds the words for the operator.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from openshell.isolation.errors import (
    BackendError,
    ConfirmError,
    DeniedError,
    DescriptorError,
    IsolationError,
    NegotiationError,
    ProcessError,
    TerminatedError,
    TokenError,
    TransportLostError,
    UnavailableError,
)
from openshell.isolation.start_failures import StartFailure
from openshell.status import StatusCode
from openshell.verdicts import Category, Stage
from supervisor_reference.errors import GatewayError, StageError

if TYPE_CHECKING:
    from collections.abc import Iterator

_UNREACHABLE = frozenset({StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED})


def of_gateway(error: GatewayError, stage: Stage) -> StageError:
    """Return what a failed call to the gateway means for a launch.

    Args:
        error: The call's error; its texts are the gateway's, which may be shown.
        stage: How far the supervisor had come.
    """
    if error.status is StatusCode.UNIMPLEMENTED:
        category = Category.INCOMPATIBLE
        public = f"the gateway does not offer {error.operation}, which this supervisor needs"
    else:
        category = Category.INFRASTRUCTURE
        public = error.reason
    return StageError(
        stage=stage,
        category=category,
        public=public,
        private=error.reason,
        status=error.status,
        retryable=error.status in _UNREACHABLE,
    )


def of_boundary(error: IsolationError, stage: Stage, *, backend_name: str, program: str = "") -> StageError:
    """Return what an error of the isolation backend means for a launch.

    Args:
        error: The backend's error.
        stage: How far the supervisor had come.
        backend_name: The admitted backend.
        program: The agent's program, for failures to start it; empty means the image's login shell.
    """
    category, what = _category(error, stage, program)
    return StageError(
        stage=stage,
        category=category,
        public=f"isolation backend '{backend_name}' {what}",
        private=str(error),
        status=error.status,
        retryable=error.retryable,
    )


def _category(error: IsolationError, stage: Stage, program: str) -> tuple[Category, str]:
    what = "failed"
    category = Category.INFRASTRUCTURE
    match error:
        case NegotiationError():
            # Versions and capability names, by grammar; the peer's name and words are not.
            return Category.INCOMPATIBLE, f"does not fit this supervisor: {error.public}"
        case BackendError() if stage is Stage.ATTACH and error.is_refusal:
            return Category.POLICY_REFUSED, "refused attachment"
        case DeniedError() if stage is Stage.START_AGENT:
            # The program or its working directory can make a policy unenforceable that was fine at Attach.
            return Category.POLICY_REFUSED, "refused to run the agent under the sandbox's policy"
        case TokenError() | DeniedError():
            what = "refused this supervisor"
        case TransportLostError():
            what = "could not be reached" if stage is Stage.BUILD else "was lost: its connection broke"
        case TerminatedError():
            what = "has ended"
        case UnavailableError():
            what = "is not available"
        case ConfirmError():
            what = "could not confirm that the policy is enforced"
        case ProcessError() if stage is Stage.START_AGENT:
            named = f"the agent's program {program!r}" if program else "the image's login shell"
            cause = StartFailure.told_in(str(error))
            return Category.ENTRYPOINT, f"could not start {named}{f': {cause}' if cause else ''}"
        case ProcessError():
            what = "lost sight of the agent's process"
        case DescriptorError():
            what = "was launched with a description that it does not accept"
        case _:
            pass
    return category, what


@contextlib.contextmanager
def failing_as(stage: Stage, *, backend_name: str = "", program: str = "") -> Iterator[None]:
    """Turn the errors of peers that leave the block into the failure of a stage.

    Args:
        stage: How far the supervisor has come.
        backend_name: The admitted backend.
        program: The agent's program.

    Raises:
        StageError: In place of a `GatewayError` or an `IsolationError`.
    """
    try:
        yield
    except GatewayError as error:
        raise of_gateway(error, stage) from error
    except IsolationError as error:
        raise of_boundary(error, stage, backend_name=backend_name, program=program) from error
