"""A new sandbox takes the id of a failed one, of which nothing is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from scripted.compute_gateway import sandbox
from scripted.launching_engine import USER_IMAGE, launching
from scripted.memory_engine import SUPERVISOR, WORKLOAD, record

from driver_docker import labels
from driver_docker.exits import Exits
from driver_docker.provision import Provisioner
from driver_docker.requests import decode_sandbox
from driver_docker.sandbox_record import RecordPhase

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_leaks")


async def test_what_a_failed_sandbox_left_under_another_name_of_the_driver_goes_before_the_next(tmp_path: Path) -> None:
    request = decode_sandbox(sandbox(USER_IMAGE), namespace="default", allow_driver_config=False)
    async with launching(tmp_path) as (driver, launcher):
        failed = driver.services.table.add(record(request.sandbox_id, RecordPhase.FAILED))
        await driver.services.save(failed)
        for name in (WORKLOAD, SUPERVISOR):
            driver.engine.hold(name, labels=driver.labels(request.sandbox_id) | {labels.DRIVER_OWNER: "another"})
        provisioner = Provisioner(
            driver.services, launcher, Exits(driver.services, driver.background), driver.background
        )
        assert request.launch is not None
        await provisioner.create(request, request.launch)
        assert not {WORKLOAD, SUPERVISOR} & set(driver.engine.containers)
        await driver.settle()
        assert [each.record.phase for each in driver.services.table] == [RecordPhase.ACTIVE]
