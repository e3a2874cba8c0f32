"""What is on an engine, so that a run can prove that it left everything as it was."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from docker import APIClient

RUN_LABEL = "openshell-docker.test/run"
"""Carried, with the run's own value, by everything that a test makes through its owner label."""


class Kind(StrEnum):
    """A sort of object on an engine."""

    CONTAINER = "container"
    VOLUME = "volume"
    NETWORK = "network"
    TAG = "tag"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Item:
    """One object; two with the same kind, identity and state are the same to us."""

    kind: Kind
    identity: str
    state: str

    @property
    def key(self) -> tuple[Kind, str]:
        """What names it, whatever its state."""
        return (self.kind, self.identity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Everything on an engine at one moment, with a name for people."""

    items: dict[Item, str]

    @classmethod
    def of(cls, client: APIClient, run: str | None = None) -> Inventory:
        """Look at an engine.

        Args:
            client: The engine.
            run: Look only for what carries this run's label; everything when ``None``.
        """
        filters = {"label": f"{RUN_LABEL}={run}"} if run is not None else {}
        items: dict[Item, str] = {}
        for container in client.containers(all=True, filters=filters):
            item = Item(kind=Kind.CONTAINER, identity=container["Id"], state=container["State"])
            items[item] = (container.get("Names") or [container["Id"][:12]])[0].lstrip("/")
        for volume in client.volumes(filters=filters)["Volumes"] or []:
            items[Item(kind=Kind.VOLUME, identity=volume["Name"], state=volume["CreatedAt"])] = volume["Name"]
        for network in client.networks(filters=filters):
            items[Item(kind=Kind.NETWORK, identity=network["Id"], state="")] = network["Name"]
        for image in client.images(filters=filters):
            for tag in image.get("RepoTags") or []:
                if tag != "<none>:<none>":
                    items[Item(kind=Kind.TAG, identity=tag, state=image["Id"])] = tag
        return cls(items=items)


def differences(before: Inventory, after: Inventory) -> list[str]:
    """What a run changed, in words; empty where it left everything as it was."""
    found: list[str] = []
    then = {item.key: item for item in before.items}
    now = {item.key: item for item in after.items}
    for key in sorted(then.keys() | now.keys()):
        old, new = then.get(key), now.get(key)
        if old is None and new is not None:
            found.append(f"{new.kind} {after.items[new]} was left behind")
        elif old is not None and new is None:
            found.append(f"{old.kind} {before.items[old]} was there before and is gone")
        elif old is not None and new is not None and old.state != new.state:
            found.append(f"{old.kind} {before.items[old]} was {old.state} and is {new.state}")
    return found
