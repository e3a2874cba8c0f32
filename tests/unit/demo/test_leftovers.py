"""What an earlier demo left is removed and named."""

from __future__ import annotations

from typing import Any, cast
from unittest.mock import Mock

from examples.demo.leftovers import remove_earlier


def test_a_container_that_the_engine_lists_without_a_name_is_named_by_its_id() -> None:
    engine: Any = Mock()
    engine.containers.return_value = [{"Id": "4f5e", "Names": None}, {"Id": "6a7b", "Names": ["/named"]}]
    engine.volumes.return_value = {"Volumes": None}
    assert remove_earlier(cast("Any", engine), "demo") == ["4f5e", "named"]
