"""The tables of the gateway's state."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import sqlalchemy as sa

SCHEMA_VERSION = "1"
"""Version of the tables; a database of another version is refused."""

METADATA = sa.MetaData()

GATEWAY = sa.Table(
    "gateway",
    METADATA,
    sa.Column("key", sa.String(64), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)
SANDBOXES = sa.Table(
    "sandboxes",
    METADATA,
    sa.Column("id", sa.String(36), primary_key=True),
    sa.Column("workspace", sa.String(63), nullable=False),
    sa.Column("name", sa.String(63), nullable=False),
    sa.Column("created_us", sa.BigInteger, nullable=False),
    sa.Column("resource_version", sa.BigInteger, nullable=False),
    sa.Column("spec", sa.LargeBinary, nullable=False),
    sa.Column("record", sa.Text, nullable=False),
    sa.UniqueConstraint("workspace", "name"),
    sa.Index("sandboxes_by_age", "created_us", "id"),
)
POLICIES = sa.Table(
    "policy_revisions",
    METADATA,
    sa.Column("sandbox_id", sa.String(36), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("policy", sa.LargeBinary, nullable=False),
    sa.Column("revision", sa.Text, nullable=False),
)
EVENTS = sa.Table(
    "platform_events",
    METADATA,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("sandbox_id", sa.String(36), nullable=False, index=True),
    sa.Column("event", sa.Text, nullable=False),
)
REQUESTS = sa.Table(
    "requests",
    METADATA,
    sa.Column("caller", sa.String(64), primary_key=True),
    sa.Column("request_id", sa.String(36), primary_key=True),
    sa.Column("method", sa.String(64), primary_key=True),
    sa.Column("workspace", sa.String(63), primary_key=True),
    sa.Column("payload_sha256", sa.String(64), nullable=False),
    sa.Column("answered_us", sa.BigInteger, index=True),
    sa.Column("reply", sa.LargeBinary),
)
"""Requests that named an id; one without a reply was begun and has no known outcome."""

FORMER_REPLIES = sa.Table("replies", sa.MetaData())
"""What `REQUESTS` took the place of. It held whole answers, the environments of sandboxes with them."""


def micros(moment: datetime) -> int:
    """A time as it is stored: microseconds since 1970."""
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
