"""Stored form of the gateway's records: JSON, except for the protobuf bytes that have a column of their own."""

from __future__ import annotations

from dataclasses import replace

from pydantic import TypeAdapter

from gateway_embedded.sandboxes import PlatformEvent, PolicyRevision, SandboxRecord

_RECORD = TypeAdapter(SandboxRecord)
_REVISION = TypeAdapter(PolicyRevision)
_EVENT = TypeAdapter(PlatformEvent)


def dump_record(record: SandboxRecord) -> str:
    """JSON of a record without its spec."""
    return _RECORD.dump_json(replace(record, spec=b"")).decode()


def load_record(text: str) -> SandboxRecord:
    """A record whose spec is still to be filled in."""
    return _RECORD.validate_json(text)


def dump_revision(revision: PolicyRevision) -> str:
    """JSON of a policy revision without the policy."""
    return _REVISION.dump_json(replace(revision, policy=b"")).decode()


def load_revision(text: str) -> PolicyRevision:
    """A policy revision whose policy is still to be filled in."""
    return _REVISION.validate_json(text)


def dump_event(event: PlatformEvent) -> str:
    """JSON of an event."""
    return _EVENT.dump_json(event).decode()


def load_event(text: str) -> PlatformEvent:
    """An event as it was stored."""
    return _EVENT.validate_json(text)
