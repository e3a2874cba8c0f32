"""The images in a real engine: they load, run where nothing else is, and leave nothing behind."""

from __future__ import annotations

import dataclasses
import json
import socket
from typing import TYPE_CHECKING, Any

import docker
import pytest
from docker.errors import APIError, ImageNotFound

from devtools.images import LoadError, images_in_engine, keep_images, load_images, unload_images
from devtools.images.cache import ArtifactCache
from devtools.images.layout import RUNTIME_ENTRY, SUPERVISOR_ENTRY, Role
from devtools.images.variants import (
    build_test_image,
    empty_folder_image,
    not_executable,
    supervisor_stub,
    without_binary,
    workload_of_architecture,
    workload_with_user,
    workload_without_accounts,
    workload_without_user,
)
from openshell.ready_line import READY_LABEL, READY_LABEL_VALUE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from docker import APIClient
    from scripted.ownership import OwnerLabel

    from devtools.images import BuiltImage
    from devtools.images.layout import ImageRecipe

PYTHON = "/.openshell/runtime/python/bin/python3"
EVERYTHING = (
    "import sys, grpc.aio, google.protobuf.message, cryptography.hazmat.primitives.asymmetric.ed25519, jwt, ssl;"
    "import asyncio, structlog;"
    "ssl.create_default_context();"
    "places = {getattr(m, '__file__', None) or '/.openshell/' for m in list(sys.modules.values())};"
    "mapped = {line.split()[5] for line in open('/proc/self/maps') if '.so' in line};"
    "print([p for p in sorted(places | mapped) if not p.startswith('/.openshell/')], sys.getfilesystemencoding())"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a container ended."""

    code: int
    output: str


class Containers:
    """Runs containers of no network that carry the test's label, and removes them."""

    def __init__(self, client: APIClient, owner: OwnerLabel) -> None:
        self._client = client
        self._labels = owner.labels
        self._made: list[str] = []

    def create(
        self,
        image: str,
        *command: str,
        entrypoint: str | None = None,
        user: str | None = None,
        environment: dict[str, str] | None = None,
        runtime_volume: str = "",
    ) -> str:
        """Make a container that is confined as sandboxes are."""
        host = self._client.create_host_config(
            network_mode="none",
            read_only=True,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            binds=[f"{runtime_volume}:/.openshell/runtime:ro"] if runtime_volume else [],
        )
        created = self._client.create_container(
            image,
            list(command) or None,
            entrypoint=None if entrypoint is None else [entrypoint],
            user=user,
            environment=environment,
            host_config=host,
            labels=self._labels,
        )
        self._made.append(str(created["Id"]))
        return self._made[-1]

    def run(
        self,
        image: str,
        *command: str,
        entrypoint: str | None = None,
        user: str | None = None,
        environment: dict[str, str] | None = None,
        runtime_volume: str = "",
    ) -> Ended:
        """Make a container, start it and wait for its end."""
        container = self.create(
            image,
            *command,
            entrypoint=entrypoint,
            user=user,
            environment=environment,
            runtime_volume=runtime_volume,
        )
        self._client.start(container)
        code = int(self._client.wait(container, timeout=60)["StatusCode"])
        return Ended(code=code, output=self._client.logs(container).decode())

    def runtime_volume(self, image: str) -> str:
        """Make a volume that holds the runtime: the engine fills it from the image when a container is made."""
        name = str(self._client.create_volume(labels=self._labels)["Name"])
        host = self._client.create_host_config(network_mode="none", binds=[f"{name}:/.openshell/runtime"])
        made = self._client.create_container(image, ["never"], host_config=host, labels=self._labels)
        self._client.remove_container(made["Id"])
        return name

    def remove(self) -> None:
        """Remove what was made, so that its images can be untagged."""
        for container in self._made:
            self._client.remove_container(container, force=True, v=True)


def inspect(client: APIClient, reference: str) -> dict[str, Any]:
    """What the engine knows of an image."""
    found: dict[str, Any] = client.inspect_image(reference)  # type: ignore[no-untyped-call]  # open in the stubs
    return found


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    return ArtifactCache(tmp_path / "images")


@pytest.fixture
def loaded(
    docker_client: APIClient, owner_label: OwnerLabel, cache: ArtifactCache
) -> Iterator[Callable[[ImageRecipe], BuiltImage]]:
    """Builds images for the test and has them in the engine for as long as it runs."""
    in_use = []

    def load(recipe: ImageRecipe) -> BuiltImage:
        image = build_test_image(recipe, cache=cache, extra_labels=owner_label.labels)
        in_use.append(load_images(docker_client, [image], cache=cache))
        return image

    yield load
    for item in in_use:
        unload_images(docker_client, item)


@pytest.fixture
def containers(
    docker_client: APIClient, owner_label: OwnerLabel, loaded: Callable[[ImageRecipe], BuiltImage]
) -> Iterator[Containers]:
    """Containers that are gone before their images are untagged."""
    del loaded
    made = Containers(docker_client, owner_label)
    yield made
    made.remove()


def tagged(client: APIClient, image: BuiltImage) -> bool:
    try:
        inspect(client, image.reference)
    except ImageNotFound:
        return False
    return True


@pytest.mark.parametrize("environment", [{}, {"LC_ALL": "C"}, {"LC_ALL": "de_DE.ISO-8859-1", "PYTHONHOME": "/x"}])
def test_the_runtime_runs_in_an_image_that_holds_nothing(
    containers: Containers,
    loaded: Callable[[ImageRecipe], BuiltImage],
    runtime_image: str,
    environment: dict[str, str],
) -> None:
    volume = containers.runtime_volume(runtime_image)
    ended = containers.run(
        loaded(empty_folder_image()).reference,
        "-ISXutf8",
        "-c",
        EVERYTHING,
        entrypoint=PYTHON,
        user="12345:12345",
        environment=environment,
        runtime_volume=volume,
    )

    assert ended == Ended(code=0, output="[] utf-8\n")


def test_the_runtimes_entry_is_a_program_for_any_user(
    containers: Containers, loaded: Callable[[ImageRecipe], BuiltImage], runtime_image: str
) -> None:
    volume = containers.runtime_volume(runtime_image)
    ended = containers.run(
        loaded(empty_folder_image()).reference,
        "--bootstrap",
        "/empty/bootstrap.json",
        entrypoint=RUNTIME_ENTRY,
        user="12345:12345",
        runtime_volume=volume,
    )

    assert ended.code not in {0, 126, 127}
    assert "ModuleNotFoundError" not in ended.output
    assert "bootstrap.json" in ended.output


def test_the_health_command_fails_without_a_socket(containers: Containers, supervisor_image: str) -> None:
    ended = containers.run(supervisor_image, "health", "--socket", "/run/openshell/health.sock")

    assert ended == Ended(code=1, output="")


def test_the_supervisor_starts_as_nobody_on_a_read_only_root(
    docker_client: APIClient, containers: Containers, supervisor_image: str
) -> None:
    config = inspect(docker_client, supervisor_image)["Config"]
    ended = containers.run(supervisor_image, "--no-such-option")

    assert (config["User"], config["Entrypoint"]) == ("65534:65534", [SUPERVISOR_ENTRY])
    assert ended.code not in {0, 126, 127}
    assert "ModuleNotFoundError" not in ended.output


def test_images_say_what_they_are(
    docker_client: APIClient, workload_image: str, runtime_image: str, supervisor_image: str
) -> None:
    found = {
        role: inspect(docker_client, image)["Config"]["Labels"]
        for role, image in (("workload", workload_image), ("runtime", runtime_image), ("supervisor", supervisor_image))
    }

    assert {role: each["openshell.ai/component"] for role, each in found.items()} == {role: role for role in found}
    assert {each["openshell.ai/compute-protocol"] for each in found.values()} == {"1.0"}
    assert {each["openshell.ai/isolation-protocol"] for each in found.values()} == {"1.0"}
    assert all(each["org.opencontainers.image.version"] for each in found.values())
    assert all(each["org.opencontainers.image.revision"] for each in found.values())
    assert {role: each.get(READY_LABEL) for role, each in found.items()} == {
        "workload": None, "runtime": None, "supervisor": READY_LABEL_VALUE,
    }  # fmt: skip


def test_the_workload_has_a_shell_and_an_account_that_may_write_its_folder(
    containers: Containers, workload_image: str
) -> None:
    ended = containers.run(workload_image, "sh", "-c", "id -un; pwd; ls -ld . | cut -c1-10")

    assert ended == Ended(code=0, output="sandbox\n/sandbox\ndrwxr-xr-x\n")


def test_loaded_images_have_the_id_that_the_builder_computed(
    docker_client: APIClient, loaded: Callable[[ImageRecipe], BuiltImage]
) -> None:
    image = loaded(empty_folder_image())

    assert inspect(docker_client, image.reference)["Id"] == image.image_id


def test_unloading_leaves_a_tag_that_was_there_before(
    docker_client: APIClient, cache: ArtifactCache, owner_label: OwnerLabel
) -> None:
    image = build_test_image(empty_folder_image(), cache=cache, extra_labels=owner_label.labels)
    keep_images(load_images(docker_client, [image], cache=cache))

    with images_in_engine(docker_client, [image], cache=cache):
        assert tagged(docker_client, image)

    assert tagged(docker_client, image)


def test_the_last_of_several_users_untags(
    docker_client: APIClient, cache: ArtifactCache, owner_label: OwnerLabel
) -> None:
    image = build_test_image(empty_folder_image(), cache=cache, extra_labels=owner_label.labels)
    first = load_images(docker_client, [image], cache=cache)
    second = load_images(docker_client, [image], cache=cache)

    assert unload_images(docker_client, first) == []
    assert tagged(docker_client, image)
    assert unload_images(docker_client, second) == [image.reference]
    assert not tagged(docker_client, image)


def test_what_a_killed_run_loaded_is_untagged_by_the_next(
    docker_client: APIClient, cache: ArtifactCache, owner_label: OwnerLabel
) -> None:
    left = build_test_image(empty_folder_image(), cache=cache, extra_labels=owner_label.labels)
    killed = load_images(docker_client, [left], cache=cache)
    for lease in killed.leases.values():
        lease.close()
    other = build_test_image(without_binary(Role.RUNTIME), cache=cache, extra_labels=owner_label.labels)

    with images_in_engine(docker_client, [other], cache=cache):
        pass

    assert not tagged(docker_client, left)
    assert not tagged(docker_client, other)


def test_a_failed_load_names_the_image_and_takes_out_what_was_loaded(
    docker_client: APIClient, cache: ArtifactCache, owner_label: OwnerLabel, tmp_path: Path
) -> None:
    good = build_test_image(empty_folder_image(), cache=cache, extra_labels=owner_label.labels)
    (tmp_path / "broken.tar").write_bytes(b"no archive at all" * 1000)
    broken = dataclasses.replace(good, reference="openshell-local/test-broken:1", archive_path=tmp_path / "broken.tar")

    with pytest.raises(LoadError, match="openshell-local/test-broken:1 could not be loaded"):
        load_images(docker_client, [good, broken], cache=cache)
    assert not tagged(docker_client, good)


def test_an_engine_that_is_not_there_is_a_load_error(cache: ArtifactCache) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # It does not listen, and nobody else can on this port.
        client = docker.APIClient(base_url=f"tcp://127.0.0.1:{silent.getsockname()[1]}", version="1.41")
        with pytest.raises(LoadError, match="does not answer"):
            load_images(client, [], cache=cache)
        client.close()


@pytest.mark.parametrize(
    ("recipe", "entry"),
    [
        (without_binary(Role.SUPERVISOR), SUPERVISOR_ENTRY),
        (not_executable(Role.SUPERVISOR, SUPERVISOR_ENTRY), SUPERVISOR_ENTRY),
    ],
    ids=["absent", "not executable"],
)
def test_a_broken_image_does_not_start(
    docker_client: APIClient,
    containers: Containers,
    loaded: Callable[[ImageRecipe], BuiltImage],
    recipe: ImageRecipe,
    entry: str,
) -> None:
    container = containers.create(loaded(recipe).reference, "x", entrypoint=entry)

    with pytest.raises(APIError):
        docker_client.start(container)


def test_a_stub_supervisor_does_what_it_is_told(
    containers: Containers, loaded: Callable[[ImageRecipe], BuiltImage]
) -> None:
    image = loaded(supervisor_stub("exits", "echo sorry >&2; exit 3", health_exit_code=0)).reference

    assert containers.run(image) == Ended(code=3, output="sorry\n")
    assert containers.run(image, "health", "--socket", "/x") == Ended(code=0, output="")


def test_variants_of_the_workload_are_what_they_say(
    docker_client: APIClient, containers: Containers, loaded: Callable[[ImageRecipe], BuiltImage]
) -> None:
    facts = {
        name: inspect(docker_client, loaded(recipe).reference)
        for name, recipe in {
            "no user": workload_without_user(),
            "root": workload_with_user("root"),
            "arm": workload_of_architecture("arm64"),
        }.items()
    }
    bare = containers.run(loaded(workload_without_accounts()).reference, "ls", "/")

    assert (facts["no user"]["Config"]["User"], facts["root"]["Config"]["User"]) == ("", "root")
    assert facts["arm"]["Architecture"] == "arm64"
    assert "passwd" not in json.dumps(bare.output)
    assert bare.code == 0
