from __future__ import annotations

from devtools.inventory import Inventory, Item, Kind, differences

RUNNING = Item(kind=Kind.CONTAINER, identity="c1", state="running")
STOPPED = Item(kind=Kind.CONTAINER, identity="c1", state="exited")
VOLUME = Item(kind=Kind.VOLUME, identity="v", state="2026-01-01T00:00:00Z")
TAG = Item(kind=Kind.TAG, identity="busybox:1", state="sha256:1")
MOVED_TAG = Item(kind=Kind.TAG, identity="busybox:1", state="sha256:2")


def inventory(*items: Item) -> Inventory:
    return Inventory(items={item: f"name of {item.identity}" for item in items})


def test_an_engine_left_as_it_was_has_no_differences() -> None:
    assert differences(inventory(RUNNING, TAG), inventory(TAG, RUNNING)) == []


def test_what_is_left_what_is_gone_and_what_changed_is_named() -> None:
    assert differences(inventory(RUNNING, TAG), inventory(STOPPED, VOLUME)) == [
        "container name of c1 was running and is exited",
        "tag name of busybox:1 was there before and is gone",
        "volume name of v was left behind",
    ]


def test_a_tag_that_was_moved_is_named() -> None:
    assert differences(inventory(TAG), inventory(MOVED_TAG)) == ["tag name of busybox:1 was sha256:1 and is sha256:2"]
