"""Locks by key: one for all who use a key, and none for a key that nobody uses."""

from __future__ import annotations

from driver_docker.concurrency import KeyedLocks


async def test_a_key_has_one_lock_while_it_is_used_and_none_afterwards() -> None:
    locks = KeyedLocks()
    async with locks.of("a"):
        assert locks.of("a").locked()
        assert not locks.of("b").locked()
        assert len(locks) == 1
    assert len(locks) == 0
