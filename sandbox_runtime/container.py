"""What the runtime asks of the kernel and of the container that it runs in."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from openshell.isolation.errors import cause_of
from sandbox_runtime import accounts, hardening, landlock
from sandbox_runtime.errors import PlatformError


class Container(Protocol):
    """What the backend asks of kernel and container."""

    def landlock_abi(self) -> int:
        """The kernel's Landlock ABI, 0 when there is none."""

    def process_facts(self) -> hardening.ProcessFacts:
        """The privileges of this process.

        Raises:
            PlatformError: They cannot be read.
        """

    def network_devices(self) -> str:
        """The text of ``/proc/self/net/dev``.

        Raises:
            PlatformError: It cannot be read.
        """

    def accounts(self) -> accounts.Accounts:
        """The accounts of the image."""


class OwnContainer:
    """The container in which this process runs."""

    def landlock_abi(self) -> int:
        """The kernel's Landlock ABI, 0 when there is none."""
        return landlock.kernel_abi()

    def process_facts(self) -> hardening.ProcessFacts:
        """The privileges of this process."""
        return hardening.read_own_facts()

    def network_devices(self) -> str:
        """The text of ``/proc/self/net/dev``."""
        try:
            return Path("/proc/self/net/dev").read_text("ascii", "replace")
        except OSError as error:
            raise PlatformError(f"the network interfaces cannot be listed: {cause_of(error)}") from error

    def accounts(self) -> accounts.Accounts:
        """The accounts of the image."""
        return accounts.read_accounts()
