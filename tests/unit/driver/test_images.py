"""One search for everybody who asks for the same image; policies, refreshes, and words for what goes wrong."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import pytest

from driver_docker.config import PullPolicy
from driver_docker.engine import (
    Engine,
    EngineAbsentError,
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnreachableError,
)
from driver_docker.engine_objects import EngineInfo, ImageFacts, PullProgress
from driver_docker.errors import PreconditionError
from driver_docker.image_reference import ImageReferenceError
from driver_docker.images import Images
from driver_docker.platforms import PlatformError, check_platform
from driver_docker.pull import ImageError, pull_cause
from driver_docker.registry_credentials import RegistryCredentials, RegistryLogins
from openshell.status import StatusCode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from driver_docker.errors import DriverError
    from driver_docker.image_reference import ImageReference

ID = "sha256:" + "ab" * 32
PASSWORD = "correct-horse-battery"


def facts(image_id: str = ID, architecture: str = "amd64", system: str = "linux") -> ImageFacts:
    return ImageFacts(image_id=image_id, architecture=architecture, operating_system=system)


@dataclass
class PullingEngine:
    """An engine of images only: what is here, what a pull brings, and a gate that pulls wait at."""

    here: dict[str, ImageFacts] = field(default_factory=dict)
    brings: ImageFacts | None = field(default_factory=facts)
    fails: DriverError | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    pulls: list[tuple[str, str]] = field(default_factory=list)
    credentials: list[RegistryCredentials | None] = field(default_factory=list)
    inspected: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    began: asyncio.Event = field(default_factory=asyncio.Event)
    lines: tuple[PullProgress, ...] = ()
    info: EngineInfo = field(
        default_factory=lambda: EngineInfo(
            version="1", api_version="1.41", operating_system="linux", architecture="amd64"
        )
    )

    async def inspect_image(self, reference: str) -> ImageFacts:
        self.inspected.append(reference)
        await asyncio.sleep(0)
        if reference not in self.here:
            raise EngineAbsentError(f"No such image: {reference}")
        return self.here[reference]

    async def pull_image(
        self,
        reference: ImageReference,
        on_progress: Callable[[PullProgress], None],
        *,
        credentials: RegistryCredentials | None = None,
    ) -> None:
        self.pulls.append((reference.name, reference.pulled_tag))
        self.credentials.append(credentials)
        self.began.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        for line in self.lines:
            on_progress(line)
        if self.fails is not None:
            raise self.fails
        if self.brings is not None:
            self.here[reference.local] = self.brings
        self.ended.append("done")


def images(
    engine: PullingEngine, policy: PullPolicy = PullPolicy.IF_NOT_PRESENT, logins: RegistryLogins | None = None
) -> Images:
    return Images(cast("Engine", engine), policy, logins or RegistryLogins(None, {}))


def opened(**values: object) -> PullingEngine:
    engine = PullingEngine(**values)  # type: ignore[arg-type]
    engine.gate.set()
    return engine


async def settle() -> None:
    """Let every task go as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("policy", "here", "pulled"),
    [
        (PullPolicy.ALWAYS, True, True),
        (PullPolicy.ALWAYS, False, True),
        (PullPolicy.IF_NOT_PRESENT, True, False),
        (PullPolicy.IF_NOT_PRESENT, False, True),
        (PullPolicy.NEVER, True, False),
    ],
)
async def test_the_policy_decides_whether_an_image_is_pulled(policy: PullPolicy, here: bool, pulled: bool) -> None:
    engine = opened(here={"x:1": facts("sha256:old")} if here else {})
    found = await images(engine, policy).find("x:1")
    assert found.pulled is pulled
    assert engine.pulls == ([("x", "1")] if pulled else [])
    assert found.facts.image_id == (ID if pulled else "sha256:old")


async def test_field_report_docker_py_1643_a_bare_name_is_pulled_as_latest() -> None:
    engine = opened()
    await images(engine).find("host:5000/x")
    assert engine.pulls == [("host:5000/x", "latest")]


@pytest.mark.parametrize("reference", ["x:1", ID])
async def test_what_cannot_be_pulled_is_refused_early_and_late(reference: str) -> None:
    engine = opened()
    policy = PullPolicy.IF_NOT_PRESENT if reference == ID else PullPolicy.NEVER
    with pytest.raises(PreconditionError) as early:
        await images(engine, policy).check(reference)
    assert (early.value.status, early.value.reason) == (StatusCode.FAILED_PRECONDITION, "ImagePullFailed")
    with pytest.raises(ImageError, match="is not on this engine") as late:
        await images(engine, policy).find(reference)
    assert late.value.message == early.value.message
    assert engine.pulls == []


async def test_an_early_check_pulls_nothing() -> None:
    engine = opened()
    for policy in (PullPolicy.ALWAYS, PullPolicy.IF_NOT_PRESENT):
        await images(engine, policy).check("x:1")
        with pytest.raises(ImageReferenceError):
            await images(engine, policy).check("X/")
    assert engine.pulls == []


async def test_everybody_shares_one_search_and_late_comers_hear_that_a_pull_goes_on() -> None:
    layer = PullProgress(status="Pull complete", layer_id="0" * 12)
    engine = PullingEngine(lines=(layer,))
    found = images(engine)
    told: dict[str, list[object]] = {name: [] for name in "abc"}

    def ask(name: str, reference: str) -> asyncio.Task[object]:
        heard = told[name]
        return asyncio.create_task(
            found.find(reference, on_pull=lambda: heard.append("pulling"), on_progress=heard.append)
        )

    first = [ask("a", "x"), ask("b", "docker.io/library/x:latest")]
    await engine.began.wait()
    late = ask("c", "x:latest")
    await settle()
    assert list(told.values()) == [["pulling"]] * 3
    engine.gate.set()
    results = await asyncio.gather(*first, late)
    assert len(set(map(id, results))) == 1
    assert list(told.values()) == [["pulling", layer]] * 3
    assert engine.pulls == [("x", "latest")]


async def test_who_goes_away_takes_the_pull_from_nobody() -> None:
    engine = PullingEngine()
    found = images(engine)
    heard: list[PullProgress] = []
    leaves = asyncio.create_task(found.find("x:1", on_progress=heard.append))
    stays = asyncio.create_task(found.find("x:1"))
    await engine.began.wait()
    leaves.cancel()
    await asyncio.wait([leaves])
    assert leaves.cancelled()
    engine.lines = (PullProgress(status="Pull complete", layer_id="0" * 12),)
    engine.gate.set()
    assert (await stays).pulled
    assert engine.ended == ["done"]
    assert heard == []


async def test_the_last_who_goes_away_ends_the_pull_and_the_next_one_begins_anew(no_leaks: None) -> None:
    engine = PullingEngine()
    found = images(engine)
    waiting = [asyncio.create_task(found.find("x:1")) for _ in range(3)]
    await engine.began.wait()
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    assert engine.ended == ["cancelled"]
    engine.gate.set()
    assert (await found.find("x:1")).pulled
    assert len(engine.pulls) == 2


async def test_who_comes_while_an_abandoned_pull_still_ends_gets_one_of_its_own() -> None:
    engine = PullingEngine()
    found = images(engine)
    leaves = asyncio.create_task(found.find("x:1"))
    await engine.began.wait()
    leaves.cancel()
    await asyncio.sleep(0)
    comes = asyncio.create_task(found.find("x:1"))
    engine.gate.set()
    assert (await comes).pulled
    assert leaves.cancelled()


async def test_a_failure_is_told_to_everybody_and_not_remembered() -> None:
    engine = PullingEngine(fails=EngineRefusedError("manifest unknown"))
    found = images(engine)
    waiting = [asyncio.create_task(found.find("h:1/x:1")) for _ in range(2)]
    await engine.began.wait()
    engine.gate.set()
    for task in waiting:
        with pytest.raises(ImageError, match="image h:1/x:1 could not be pulled: manifest unknown") as failed:
            await task
        assert failed.value.reason == "ImagePullFailed"
        assert failed.value.status is StatusCode.FAILED_PRECONDITION
    engine.fails = None
    assert (await found.find("h:1/x:1")).pulled
    assert len(engine.pulls) == 2


@pytest.mark.parametrize("kind", [EngineUnreachableError, EngineTimeoutError])
async def test_a_pull_that_breaks_off_is_a_failed_pull_that_may_be_tried_again(
    kind: type[EngineUnreachableError],
) -> None:
    engine = opened(fails=kind("the engine's answer broke off"))
    with pytest.raises(ImageError, match="could not be pulled: the engine's answer broke off") as failed:
        await images(engine).find("x:1")
    assert failed.value.status is StatusCode.UNAVAILABLE
    assert failed.value.retryable


async def test_a_pull_that_brings_nothing_is_a_failure_with_the_engines_words() -> None:
    engine = opened(brings=None)
    with pytest.raises(ImageError, match="was pulled but cannot be used: No such image: x:1"):
        await images(engine).find("x:1")


def login(tmp_path: Path, registry: str) -> RegistryLogins:
    encoded = b64encode(f"ann:{PASSWORD}".encode()).decode()
    (tmp_path / "config.json").write_text(json.dumps({"auths": {registry: {"auth": encoded}}}), "utf-8")
    return RegistryLogins(tmp_path / "config.json", {})


async def test_a_login_is_sent_to_its_registry_only(tmp_path: Path) -> None:
    engine = opened()
    found = images(engine, logins=login(tmp_path, "h:1"))
    for reference in ("h:1/x:1", "h:2/x:1", "x:1"):
        await found.find(reference)
    assert [one and one.registry for one in engine.credentials] == ["h:1", None, None]


@pytest.mark.parametrize("words", ["no basic auth credentials", "unauthorized: authentication required", "denied: 403"])
async def test_a_refused_access_names_registry_and_file(tmp_path: Path, words: str) -> None:
    engine = opened(fails=EngineRefusedError(words))
    with pytest.raises(ImageError) as without:
        await images(engine, logins=login(tmp_path, "h:2")).find("h:1/x:1")
    assert f"sent without a login: {tmp_path}/config.json has none for h:1" in without.value.message
    with pytest.raises(ImageError) as wrong:
        await images(engine, logins=login(tmp_path, "h:1")).find("h:1/x:1")
    assert f"sent with the login for h:1 from {tmp_path}/config.json" in wrong.value.message


async def test_a_login_that_cannot_be_had_keeps_no_public_image_away(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"credsStore": "absent"}', "utf-8")
    logins = RegistryLogins(tmp_path / "config.json", {"PATH": str(tmp_path)})
    engine = opened()
    assert (await images(engine, logins=logins).find("x:1")).pulled
    engine = opened(fails=EngineRefusedError("denied"))
    with pytest.raises(ImageError, match=r"could not be pulled: denied \(credential helper docker-credential-absent"):
        await images(engine, logins=logins).find("x:1")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "no further detail"),
        ("\n:\n", "no further detail"),
        ("line\none\x1b[31m", "line one [31m"),
        (f"bad login {PASSWORD}", "bad login [redacted]"),
        (
            'Get "https://ann:pw@h:1/v2/x?X-Amz-Signature=abc&y=1#z": EOF',
            'Get "https://h:1/v2/x": EOF',
        ),
        ("Get https://h:1/token?account=ann: denied", "Get https://h:1/token denied"),
        ("x" * 5000, "x" * 597 + "..."),
    ],
)
def test_the_registrys_words_are_bounded_clean_and_without_secrets(words: str, told: str) -> None:
    credentials = RegistryCredentials(registry="h:1", server_address="h:1", username="ann", password=PASSWORD)
    assert pull_cause(words, credentials) == told


@pytest.mark.parametrize(
    ("image", "engine", "fits"),
    [
        ("linux/amd64", "linux/amd64", True),
        ("linux/amd64", "linux/x86_64", True),
        ("linux/arm64", "linux/aarch64", True),
        ("linux/386", "linux/amd64", True),
        ("linux/arm", "linux/arm64", True),
        ("/", "linux/amd64", True),
        ("linux/amd64", "/", True),
        ("linux/arm64", "linux/amd64", False),
        ("linux/amd64", "linux/arm64", False),
        ("linux/amd64", "linux/386", False),
        ("linux/arm", "linux/amd64", False),
        ("windows/amd64", "linux/amd64", False),
    ],
)
def test_field_report_50_an_image_for_another_platform_is_told_by_name(image: str, engine: str, fits: bool) -> None:
    image_system, image_machine = image.split("/")
    system, machine = engine.split("/")
    info = EngineInfo(version="1", api_version="1.41", operating_system=system, architecture=machine)
    wanted = facts(architecture=image_machine, system=image_system)
    if fits:
        check_platform("x:1", wanted, info)
        return
    with pytest.raises(PlatformError, match=f"x:1 was found but does not match the specified platform: .*{image}"):
        check_platform("x:1", wanted, info)


@pytest.mark.parametrize("here", [True, False])
async def test_field_report_50_a_wrong_platform_is_refused_whether_pulled_or_here(here: bool) -> None:
    foreign = facts(architecture="arm64")
    engine = opened(here={"x:1": foreign} if here else {}, brings=foreign)
    with pytest.raises(PlatformError) as refused:
        await images(engine).find("x:1")
    assert refused.value.reason == "ImagePlatformMismatch"
    with pytest.raises(PlatformError):
        await images(engine).check("x:1")


async def test_the_engines_own_words_about_a_platform_are_kept() -> None:
    words = "image with reference x:1 was found but does not match the specified platform: wanted linux/amd64"
    engine = opened(fails=EngineAbsentError(words))
    with pytest.raises(ImageError, match=words):
        await images(engine).find("x:1")


@pytest.mark.parametrize(
    ("reference", "policy", "pulls"),
    [
        ("x:dev", PullPolicy.IF_NOT_PRESENT, 1),
        ("x", PullPolicy.ALWAYS, 1),
        ("x:latest", PullPolicy.NEVER, 0),
        ("x:1", PullPolicy.ALWAYS, 0),
    ],
)
async def test_field_report_13_only_a_tag_that_moves_is_refreshed(
    reference: str, policy: PullPolicy, pulls: int
) -> None:
    engine = opened(here={reference: facts("sha256:old")})
    found = images(engine, policy)
    await found.refresh(reference)
    assert len(engine.pulls) == pulls
    assert (await found.find_component(reference)).facts.image_id == (ID if pulls else "sha256:old")
    assert len(engine.pulls) == pulls


async def test_field_report_13_a_launch_waits_for_the_refresh_that_goes_on() -> None:
    engine = PullingEngine(here={"x:dev": facts("sha256:old")})
    found = images(engine)
    refresh = asyncio.create_task(found.refresh("x:dev"))
    await engine.began.wait()
    launch = asyncio.create_task(found.find_component("docker.io/library/x:dev"))
    await settle()
    assert not launch.done()
    engine.here["docker.io/library/x:dev"] = facts("sha256:new")
    engine.gate.set()
    assert (await launch).facts.image_id == "sha256:new"
    await refresh


async def test_a_refresh_that_fails_keeps_the_copy_and_says_so_only_where_there_is_one() -> None:
    engine = opened(here={"x:dev": facts("sha256:old")}, fails=EngineRefusedError("no route to host"))
    found = images(engine)
    await found.refresh("x:dev")
    assert (await found.find_component("x:dev")).facts.image_id == "sha256:old"
    with pytest.raises(ImageError, match="no route to host"):
        await found.refresh("y:dev")
    assert len(engine.pulls) == 2


async def test_a_refresh_that_is_cancelled_holds_no_launch_up() -> None:
    engine = PullingEngine(here={"x:dev": facts("sha256:old")})
    found = images(engine)
    refresh = asyncio.create_task(found.refresh("x:dev"))
    await engine.began.wait()
    launch = asyncio.create_task(found.find_component("x:dev"))
    await settle()
    refresh.cancel()
    assert (await launch).facts.image_id == "sha256:old"
    assert engine.ended == ["cancelled"]


async def test_components_are_pulled_where_missing_whatever_the_policy_of_sandboxes_save_never() -> None:
    for policy in (PullPolicy.ALWAYS, PullPolicy.IF_NOT_PRESENT):
        engine = opened()
        found = images(engine, policy)
        assert [(await found.find_component("x:1")).pulled for _ in range(2)] == [True, False]
    with pytest.raises(ImageError, match="'never'"):
        await images(opened(), PullPolicy.NEVER).find_component("x:1")
