from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from scripted.gateway import ScriptedGateway

from openshell import OpenShell
from openshell.wire.v1 import openshell_pb2_grpc as pb_grpc


@pytest.fixture
def gateway() -> Iterator[ScriptedGateway]:
    scripted = ScriptedGateway()  # type: ignore[abstract] # the other RPCs answer UNIMPLEMENTED
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
    pb_grpc.add_OpenShellServicer_to_server(scripted, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    scripted.endpoint = f"http://127.0.0.1:{port}"
    yield scripted
    for _ in range(8):
        scripted.hold.put(None)
    server.stop(None).wait()


@pytest.fixture
def client(gateway: ScriptedGateway) -> Iterator[OpenShell]:
    with OpenShell(gateway.endpoint) as opened:
        yield opened
