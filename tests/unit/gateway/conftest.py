from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from scripted.gateway_bench import GatewayBench


@pytest.fixture
async def bench(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[GatewayBench]:
    """A running gateway; `@pytest.mark.parametrize("bench", [config], indirect=True)` changes its configuration."""
    async with GatewayBench(tmp_path, config=getattr(request, "param", {})) as running:
        yield running
