"""The same two containers as the driver's, made with docker-py by hand, one after the other."""

from __future__ import annotations

import copy
import secrets
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from driver_docker.documents import build_documents
from driver_docker.engine_objects import ContainerFacts, ContainerStatus, HealthStatus
from driver_docker.staging import (
    SUPERVISOR_ARCHIVE_ROOT,
    WORKLOAD_ARCHIVE_ROOT,
    build_tar,
    supervisor_entries,
    workload_entries,
)
from openshell.isolation.documents import BoundaryBootstrap
from openshell.isolation.tls import issue_session_tls

if TYPE_CHECKING:
    import docker

    from openshell.isolation.documents import LaunchAuthentication, WorkloadIdentity

LABEL_PREFIX = "openshell.bench/"
"""Replaces the driver's prefix in the labels of what is made by hand."""

_BODY_KEYS = (
    "Image", "User", "Env", "Cmd", "Entrypoint", "WorkingDir", "Labels", "Healthcheck", "Tty", "StopSignal",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the two containers are made: the create bodies and the archives that go into them."""

    workload: dict[str, Any]
    supervisor: dict[str, Any]
    volumes: tuple[str, ...]
    """Names of the sandbox's own volumes; each run gets new ones in their place."""
    workload_tar: bytes
    supervisor_tar: bytes

    @classmethod
    def of(cls, client: docker.APIClient, workload_id: str, supervisor_id: str, launch: LaunchAuthentication) -> Recipe:
        """Read it from two containers that the driver made.

        Args:
            client: The engine.
            workload_id: The driver's workload container.
            supervisor_id: The driver's supervisor container.
            launch: Credentials for the files; their content is what a driver would write, and as long.
        """
        bodies = [client.inspect_container(each) for each in (workload_id, supervisor_id)]
        volumes = {mount["Name"] for body in bodies for mount in body["Mounts"] if mount["Type"] == "volume"}
        own = tuple(sorted(name for name in volumes if not name.startswith("openshell-runtime-")))
        workload_tar, supervisor_tar = _archives(bodies[0], launch)
        return cls(_body(bodies[0]), _body(bodies[1]), own, workload_tar, supervisor_tar)


@dataclass(slots=True)
class Made:
    """What one run made."""

    workload_id: str = ""
    supervisor_id: str = ""
    others: list[str] = field(default_factory=list)
    """Containers that serve the making and never start."""
    volumes: tuple[str, ...] = ()
    began: int = 0
    """When the first call was made, in nanoseconds of the monotonic clock."""


def make(client: docker.APIClient, recipe: Recipe, made: Made) -> None:
    """Create, fill and start both containers; what exists is noted in `made` as it comes into being."""
    token = secrets.token_hex(4)
    workload, supervisor, volumes = renamed(recipe, token)
    made.began = time.monotonic_ns()
    for name in volumes:
        client.create_volume(name, labels=recipe.workload["Labels"])
        made.volumes = (*made.volumes, name)
    made.workload_id = create(client, workload, f"openshell-hand-{token}")
    client.put_archive(made.workload_id, WORKLOAD_ARCHIVE_ROOT, recipe.workload_tar)
    made.supervisor_id = create(client, supervisor, f"openshell-hand-{token}-supervisor")
    client.put_archive(made.supervisor_id, SUPERVISOR_ARCHIVE_ROOT, recipe.supervisor_tar)
    client.start(made.workload_id)
    client.start(made.supervisor_id)


def unmake(client: docker.APIClient, made: Made) -> None:
    """Remove what a run made."""
    for container in (*made.others, made.supervisor_id, made.workload_id):
        if container:
            client.remove_container(container, force=True, v=True)
    for volume in made.volumes:
        client.remove_volume(volume)


def create(client: docker.APIClient, body: dict[str, Any], name: str) -> str:
    """Create a container from the body of the engine's API; its id."""
    created = client.create_container_from_config(body, name)  # type: ignore[no-untyped-call]
    return str(created["Id"])


def _body(inspected: dict[str, Any]) -> dict[str, Any]:
    config = inspected["Config"]
    body = {key: config[key] for key in _BODY_KEYS if config.get(key) is not None}
    body["Image"] = inspected["Image"]
    # As many labels as the driver's, under keys that make no driver take these for its own.
    body["Labels"] = {key.replace("openshell.ai/", LABEL_PREFIX): value for key, value in config["Labels"].items()}
    return body | {"HostConfig": inspected["HostConfig"]}


def renamed(recipe: Recipe, token: str) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """Both create bodies and the names of their volumes, new for this run."""
    new_names = {name: f"{name}-{token}" for name in recipe.volumes}
    bodies = (_renamed(body, new_names) for body in (recipe.workload, recipe.supervisor))
    return next(bodies), next(bodies), tuple(new_names.values())


def _renamed(body: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    body = copy.deepcopy(body)
    host = body["HostConfig"]
    for mount in host.get("Mounts") or ():
        mount["Source"] = names.get(mount.get("Source", ""), mount.get("Source", ""))
    host["Binds"] = [
        ":".join((names.get(bind.split(":", 1)[0], bind.split(":", 1)[0]), bind.split(":", 1)[1]))
        for bind in host.get("Binds") or ()
    ]
    return body


def _archives(workload: dict[str, Any], launch: LaunchAuthentication) -> tuple[bytes, bytes]:
    uid, _, gid = workload["Config"]["User"].partition(":")
    identity = _identity(int(uid), int(gid), workload["Image"])
    documents = build_documents(
        sandbox_id=workload["Config"]["Labels"]["openshell.ai/sandbox-id"],
        launch=launch,
        tls=issue_session_tls(launch.supervisor.session_id),
        identity=identity,
        workload=_facts(workload),
        child_environment={},
        host_gateway_ip="127.0.0.1",
    )
    BoundaryBootstrap.from_json(documents.bootstrap)
    return (
        build_tar(workload_entries(documents, identity, workspace_root="/sandbox")),
        build_tar(supervisor_entries(documents, gateway_ca=None)),
    )


def _identity(uid: int, gid: int, image_id: str) -> WorkloadIdentity:
    from openshell.isolation.documents import IdentitySource, WorkloadIdentity

    return WorkloadIdentity(
        uid=uid, gid=gid, supplementary_gids=(), source=IdentitySource.IMAGE, resource_digest=image_id
    )


def _facts(inspected: dict[str, Any]) -> ContainerFacts:
    return ContainerFacts(
        container_id=inspected["Id"],
        name=inspected["Name"].lstrip("/"),
        image_id=inspected["Image"],
        labels=inspected["Config"]["Labels"],
        status=ContainerStatus.CREATED,
        exit_code=None,
        oom_killed=False,
        error="",
        created_at=datetime.now(UTC),
        started_at=None,
        finished_at=None,
        network_mode="none",
        networks=(),
        health=HealthStatus.NONE,
        memory_limit_bytes=None,
        tty=False,
    )
