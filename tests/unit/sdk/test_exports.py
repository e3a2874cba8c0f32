from __future__ import annotations

import subprocess
import sys

import openshell
import openshell.v1


def test_every_public_name_can_be_loaded() -> None:
    assert sorted(openshell.__all__) == openshell.__all__
    for name in openshell.__all__:
        assert getattr(openshell, name) is not None
        assert name in dir(openshell)


def test_messages_of_the_public_package_are_exported() -> None:
    assert {"Sandbox", "SandboxPhase", "CreateSandboxRequest"} <= set(openshell.v1.__all__)


def test_importing_the_package_loads_neither_grpc_nor_protobuf_nor_generated_code() -> None:
    script = "import openshell, openshell.verdicts, openshell.status, sys; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    heavy = {
        name for name in loaded if name.split(".")[0] in {"grpc", "google", "betterproto2", "docker", "click", "rich"}
    }
    assert heavy == set()
    assert not any(name.startswith(("openshell.wire", "openshell._messages")) for name in loaded)
