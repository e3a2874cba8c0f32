"""The gate before every launch, with an engine that knows only images."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import structlog
from structlog.testing import capture_logs

from driver_docker.capabilities import CONTRACT_CAPABILITY, Peer
from driver_docker.compatibility import IncompatibleError
from driver_docker.config_sources import load_config
from driver_docker.engine import EngineAbsentError, EngineUnreachableError
from driver_docker.engine_objects import ImageFacts
from driver_docker.errors import PreconditionError
from driver_docker.handshake import Handshake, OlderGateways
from driver_docker.launch_gate import LaunchGate
from driver_docker.launch_steps import as_failure
from driver_docker.revisions import VERSION_LABEL
from driver_docker.sandbox_record import RecordPhase, SandboxRecord
from openshell.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from driver_docker.engine import Engine

SUPERVISOR, RUNTIME = "corp/supervisor:x", "corp/sandbox:x"
OLD_RUNTIME = "sha256:" + "1" * 64
RECORD = SandboxRecord(
    sandbox_id="sb-1",
    name="one",
    workspace="default",
    phase=RecordPhase.STOPPED,
    changed_at=datetime(2026, 1, 2, tzinfo=UTC),
)


def _image(version: str) -> ImageFacts:
    return ImageFacts(image_id="sha256:" + "0" * 64, labels={VERSION_LABEL: version})


class ImageEngine:
    """Knows images by reference; asked for anything else it fails the test."""

    def __init__(self, images: Mapping[str, ImageFacts] | None) -> None:
        self.images = images

    async def inspect_image(self, reference: str) -> ImageFacts:
        if self.images is None:
            raise EngineUnreachableError("engine is away")
        if reference not in self.images:
            raise EngineAbsentError(f"no image {reference}")
        return self.images[reference]


def _gate(images: Mapping[str, ImageFacts] | None, *, gateway: str = "0.1.5", **keys: Any) -> LaunchGate:
    config = load_config(
        {
            "bind_socket": Path("/run/x/d.sock"),
            "supervisor_image": SUPERVISOR,
            "sandbox_runtime_image": RUNTIME,
        }
        | keys,
        environment={},
    )
    handshake = Handshake(OlderGateways.REFUSE)
    handshake.shake(
        Peer(
            name="openshell/gateway",
            version=gateway,
            protocol_major=1,
            protocol_minor=0,
            supported=(CONTRACT_CAPABILITY,),
            required=(CONTRACT_CAPABILITY,),
        )
    )
    return LaunchGate(cast("Engine", ImageEngine(images)), config, handshake)


@pytest.fixture(autouse=True)
def _plain_logs() -> Iterator[None]:
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


async def test_images_of_the_gateways_revision_pass_without_a_word() -> None:
    with capture_logs() as logs:
        await _gate({SUPERVISOR: _image("0.1.5"), RUNTIME: _image("0.1.5")}).admit_new()
    assert logs == []


async def test_a_refusal_is_failed_precondition_and_names_the_condition_that_a_launch_ends_with() -> None:
    with pytest.raises(IncompatibleError) as refused:
        await _gate({SUPERVISOR: _image("0.1.4"), RUNTIME: _image("0.1.4")}).admit_new()
    assert refused.value.status is StatusCode.FAILED_PRECONDITION
    reason, message = as_failure(refused.value)
    assert reason == "ControlSupervisorStartFailed"
    assert "0.1.4" in message


async def test_an_image_that_must_be_pulled_is_judged_when_it_is_here() -> None:
    gate = _gate({RUNTIME: _image("0.1.5")})
    await gate.admit_new()
    gate.admit_images(supervisor=_image("0.1.5"), runtime=_image("0.1.5"))
    with pytest.raises(IncompatibleError):
        gate.admit_images(supervisor=_image("0.1.4"), runtime=_image("0.1.5"))


async def test_an_engine_outage_is_neither_a_fit_nor_a_misfit() -> None:
    with pytest.raises(EngineUnreachableError):
        await _gate(None).admit_new()


async def test_warnings_are_told_once_each_and_hold_nothing_up() -> None:
    gate = _gate({SUPERVISOR: _image("0.1.4"), RUNTIME: _image("0.1.4")}, compatibility="warn")
    with capture_logs() as logs:
        await gate.admit_new()
        await gate.admit_new()
        gate.admit_images(supervisor=_image("0.1.3"), runtime=_image("0.1.3"))
    assert [(entry["log_level"], entry["outcome"]) for entry in logs] == [("warning", "unsupported")] * 2
    assert "0.1.4" in logs[0]["detail"]


async def test_a_retained_sandbox_is_judged_by_the_runtime_it_was_created_with() -> None:
    images = {SUPERVISOR: _image("0.1.5"), RUNTIME: _image("0.1.5"), OLD_RUNTIME: _image("0.1.4")}
    gate = _gate(images)
    await gate.admit_again(RECORD)
    with pytest.raises(IncompatibleError, match=r"sandbox runtime image 0\.1\.4"):
        await gate.admit_again(replace(RECORD, runtime_image_id=OLD_RUNTIME))
    # After an upgrade of gateway and supervisor the sandbox is refused, never half driven.
    upgraded = _gate({**images, SUPERVISOR: _image("0.1.6"), RUNTIME: _image("0.1.6")}, gateway="0.1.6")
    await upgraded.admit_new()
    with pytest.raises(IncompatibleError):
        await upgraded.admit_again(replace(RECORD, runtime_image_id=OLD_RUNTIME))


async def test_the_tag_that_a_retained_sandbox_was_created_with_still_tells_its_runtimes_revision() -> None:
    unlabelled = ImageFacts(image_id=OLD_RUNTIME)
    gate = _gate({SUPERVISOR: _image("0.1.5"), OLD_RUNTIME: unlabelled})
    await gate.admit_again(replace(RECORD, runtime_image_id=OLD_RUNTIME, runtime_image_reference="corp/sandbox:0.1.5"))
    with pytest.raises(IncompatibleError, match="kept since the sandbox was created"):
        await gate.admit_again(
            replace(RECORD, runtime_image_id=OLD_RUNTIME, runtime_image_reference="corp/sandbox:0.1.4")
        )


async def test_a_retained_sandbox_is_never_started_under_another_backend() -> None:
    fits = {SUPERVISOR: _image("0.1.5"), RUNTIME: _image("0.1.5")}
    with pytest.raises(PreconditionError, match="does not match gateway selection 'openshell-sandbox'"):
        await _gate(fits).admit_again(replace(RECORD, isolation_backend="acme"))


async def test_a_backend_that_cannot_be_placed_holds_a_new_sandbox_up(tmp_path: Path) -> None:
    backend = {
        "kind": "unix",
        "socket_path": str(tmp_path / "gone" / "b.sock"),
        "server_name": "a",
        "trust_anchor": "/c",
    }
    gate = _gate(
        {SUPERVISOR: _image("0.1.5"), RUNTIME: _image("0.1.5")},
        isolation_backend="acme",
        isolation_backends={"acme": backend},
    )
    with pytest.raises(PreconditionError, match="cannot be placed"):
        await gate.admit_new()
    (tmp_path / "gone").mkdir()
    await gate.admit_new()
