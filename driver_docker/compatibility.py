"""Gateway, supervisor image and sandbox runtime image must be a supported triplet before anything is launched. Pure.

The rules are the table `RULES`; `docs/compatibility.md` explains them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from packaging.specifiers import SpecifierSet

from driver_docker.capabilities import PROTOCOL_MAJOR
from driver_docker.errors import ProvisioningError
from driver_docker.revisions import Component, Line, Revision
from openshell.status import StatusCode


class CompatibilityMode(StrEnum):
    """What becomes of a launch whose revisions are no supported triplet."""

    ENFORCE = "enforce"
    """It is refused."""
    WARN = "warn"
    """It goes ahead, and the log says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One supported kind of triplet. Both images must always be of the same revision."""

    gateway: Line
    images: Line
    gateway_versions: str = ""
    """Releases of the gateway, as a version specifier; empty: the very revision of the images."""
    image_versions: str = ""
    """Releases of the images, as a version specifier; empty: the very revision of the gateway."""
    why: str

    def accepts(self, gateway: Revision, images: Revision) -> bool:
        """Whether these revisions, whose lines are this rule's, form a supported triplet."""
        if not self.gateway_versions and not self.image_versions:
            return gateway.same(images)
        return _within(gateway, self.gateway_versions) and _within(images, self.image_versions)


RULES: Final = (
    Rule(
        gateway=Line.OPENSHELL,
        images=Line.OPENSHELL,
        why="upstream releases its gateway and images together and promises nothing across revisions",
    ),
    Rule(
        gateway=Line.PROJECT,
        images=Line.PROJECT,
        why="the embedded gateway and the reference images of one revision are tested together",
    ),
    Rule(
        gateway=Line.OPENSHELL,
        images=Line.PROJECT,
        gateway_versions=">=0.1.0,<0.2",
        why="the reference images speak the public contract of the 0.1 line",
    ),
    Rule(
        gateway=Line.PROJECT,
        images=Line.OPENSHELL,
        image_versions=">=0.1.0,<0.2",
        why="the embedded gateway speaks the public contract of the 0.1 line",
    ),
)


class Outcome(StrEnum):
    """What the rules say of a triplet."""

    SUPPORTED = "supported"
    UNSUPPORTED = "unsupported"
    UNKNOWN_IMAGE = "unknown image"
    """An image says no revision that can be compared: refused, because the operator can name one."""
    UNKNOWN_GATEWAY = "unknown gateway"
    """Only the gateway says none: the images decide, because the operator cannot change what it says."""
    NOT_HERE_YET = "not here yet"
    """An image must be pulled first; the launch is judged again when it is here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was found of one triplet."""

    outcome: Outcome
    message: str = ""
    """Names each component, its revision, where that was read, and what would fit; empty when supported."""

    @property
    def refused(self) -> bool:
        """Whether a launch must not go ahead where the rules are enforced."""
        return self.outcome in {Outcome.UNSUPPORTED, Outcome.UNKNOWN_IMAGE}


class IncompatibleError(ProvisioningError):
    """The revisions of gateway, supervisor and runtime are no supported triplet."""

    default_reason = "ControlSupervisorStartFailed"
    default_status = StatusCode.FAILED_PRECONDITION


def judge(gateway: Revision, supervisor: Revision, runtime: Revision) -> Finding:
    """Apply the rules to one triplet.

    The first that fits decides: labels that contradict the use of an image; an image that is not here yet; an image
    of unknown revision; images of different revisions; a gateway of unknown revision; the table.
    """
    triplet = (gateway, supervisor, runtime)
    if (fault := _contradiction(supervisor, runtime)) is not None:
        return _found(Outcome.UNSUPPORTED, triplet, *fault)
    if not (supervisor.present and runtime.present):
        return _found(Outcome.NOT_HERE_YET, triplet, "an image is not on the engine yet", "is judged when it is here")
    images_same = supervisor.same(runtime)
    unknown = next((image for image in (supervisor, runtime) if not image.known), None)
    if unknown is not None and not (images_same and gateway.same(unknown)):
        cure = (
            f"name the revision in the tag of the {unknown.component} (a digest may follow it: name:version@sha256:...)"
            f" or in its label; compatibility = 'warn' launches it as it is"
        )
        return _found(Outcome.UNKNOWN_IMAGE, triplet, f"the revision of the {unknown.component} is not known", cure)
    if not images_same:
        wanted = gateway if gateway.known and gateway.line is not Line.OTHER else supervisor
        fit = f"supervisor_image and sandbox_runtime_image both of revision {wanted.text}"
        return _found(Outcome.UNSUPPORTED, triplet, "the two images are of different revisions", fit)
    if gateway.line is Line.OTHER or not (gateway.known or gateway.same(supervisor)):
        return _found(
            Outcome.UNKNOWN_GATEWAY,
            triplet,
            "the gateway names no revision that can be compared",
            f"any of revision {supervisor.text} of its line; the two images are of one revision",
        )
    return _by_table(gateway, supervisor, runtime)


def _by_table(gateway: Revision, supervisor: Revision, runtime: Revision) -> Finding:
    images = Line.PROJECT if Line.PROJECT in {supervisor.line, runtime.line} else supervisor.line
    rules = [rule for rule in RULES if (rule.gateway, rule.images) == (gateway.line, images)]
    if any(rule.accepts(gateway, supervisor) for rule in rules):
        return Finding(outcome=Outcome.SUPPORTED)
    fits = []
    for rule in rules:
        if not rule.gateway_versions and not rule.image_versions:
            fits.append(f"supervisor_image and sandbox_runtime_image of revision {gateway.text}")
            fits.append(f"a gateway of revision {supervisor.text}")
        if rule.gateway_versions:
            fits.append(f"a gateway release {rule.gateway_versions}")
        if rule.image_versions:
            fits.append(f"both images of a release {rule.image_versions}")
    return _found(
        Outcome.UNSUPPORTED,
        (gateway, supervisor, runtime),
        "gateway and images do not form a supported combination",
        ", or ".join(fits) or "images of the gateway's own line",
    )


def _contradiction(supervisor: Revision, runtime: Revision) -> tuple[str, str] | None:
    """What the images' own labels rule out, and what would fit."""
    for image, role in ((supervisor, "supervisor"), (runtime, "runtime")):
        if image.role and image.role != role:
            key = "supervisor_image" if image.component is Component.SUPERVISOR else "sandbox_runtime_image"
            return f"the {image.component} is labelled as {image.role}", f"an image labelled {role} in {key}"
        if image.compute_protocol and _major(image.compute_protocol) != str(PROTOCOL_MAJOR):
            return (
                f"the {image.component} is made for compute protocol {image.compute_protocol}",
                f"images made for compute protocol {PROTOCOL_MAJOR}",
            )
    speaks = [image.isolation_protocol for image in (supervisor, runtime)]
    if all(speaks) and _major(speaks[0]) != _major(speaks[1]):
        return (
            f"the images speak isolation protocols {speaks[0]} and {speaks[1]}",
            "two images that speak the same one",
        )
    return None


def _found(outcome: Outcome, triplet: tuple[Revision, ...], problem: str, fit: str) -> Finding:
    members = "; ".join(map(str, triplet))
    return Finding(outcome=outcome, message=f"{problem}: {members}. What would fit: {fit}")


def _within(revision: Revision, specifier: str) -> bool:
    version = revision.version
    return not specifier or (version is not None and SpecifierSet(specifier).contains(version, prereleases=False))


def _major(version: str) -> str:
    return version.partition(".")[0]
