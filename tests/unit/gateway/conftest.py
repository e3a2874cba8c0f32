from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
from scripted.gateway_bench import GatewayBench


@pytest.fixture
async def grpc_poller() -> AsyncIterator[None]:
    """Starts grpc's one polling thread before leaks are counted: it is the process's, not the test's."""
    grpc.aio.init_grpc_aio()
    yield
    grpc.aio.shutdown_grpc_aio()


@pytest.fixture
async def bench(
    grpc_poller: None, no_leaks: None, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[GatewayBench]:
    """A running gateway; `@pytest.mark.parametrize("bench", [config], indirect=True)` changes its configuration."""
    async with GatewayBench(tmp_path, config=getattr(request, "param", {})) as running:
        yield running
