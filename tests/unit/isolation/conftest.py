"""The served toy boundary as a fixture."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from scripted.isolation_boundary import (
    GATEWAY,
    GENERATION,
    SANDBOX,
    SESSION,
    Boundary,
    Keys,
    ToyBackend,
    make_bootstrap,
    make_descriptor,
)

from openshell.isolation.server import BoundaryServer
from openshell.isolation.tls import issue_session_tls, server_context
from openshell.isolation.tokens import TokenProfile, TokenVerifier


@pytest.fixture
def recovery_seconds() -> float:
    return 30.0


@pytest.fixture
async def boundary(tmp_path: Path, recovery_seconds: float) -> AsyncIterator[Boundary]:
    keys = Keys.generate()
    path = tmp_path / "control.sock"
    bootstrap = make_bootstrap(keys, path)
    tls = issue_session_tls(SESSION)
    backend = ToyBackend(bootstrap)
    server = BoundaryServer(
        backend,
        bootstrap=bootstrap,
        tls=server_context(certificate_chain_pem=tls.certificate_chain_pem, private_key_pem=tls.private_key_pem),
        verifier=TokenVerifier(
            profile=TokenProfile.SANDBOX,
            gateway_id=GATEWAY,
            keys=bootstrap.verification_keys,
            sandbox_id=SANDBOX,
            runtime_generation=GENERATION,
        ),
        recovery_seconds=recovery_seconds,
    )
    await server.start_unix(path)
    served = Boundary(
        backend=backend,
        server=server,
        descriptor=make_descriptor(bootstrap, path, tls),
        session_tls=tls,
        keys=keys,
        socket_path=path,
    )
    try:
        yield served
    finally:
        for client in served.clients:
            await client.close()
        await server.close()
