"""The default bridge of the private engine.

``dockerd --bridge=none`` deletes an interface named ``docker0`` when it starts, even another engine's. So it is used
only where there is no such interface and no other dockerd in this network namespace; else the private engine gets a
bridge under a name of its own, made before and removed after it. In both cases the engine changes no firewall rule and
no forwarding setting.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress
from pathlib import Path

_SIOCBRADDBR = 0x89A0
_SIOCBRDELBR = 0x89A1
_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
_DEFAULT_BRIDGE = "docker0"


def other_dockerd_here() -> bool:
    """Whether a dockerd runs in our network namespace."""
    own = Path("/proc/self/ns/net").readlink()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError):
            if (folder / "comm").read_text("utf-8").strip() == "dockerd" and (folder / "ns/net").readlink() == own:
                return True
    return False


def needs_own_bridge() -> bool:
    """Whether ``--bridge=none`` could take an interface from somebody else."""
    return _DEFAULT_BRIDGE in {name for _, name in socket.if_nameindex()} or other_dockerd_here()


def create(name: str) -> None:
    """Make a bridge.

    Raises:
        OSError: It is not allowed, or the kernel has no bridges.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        fcntl.ioctl(handle, _SIOCBRADDBR, name.encode() + b"\0")


def remove(name: str) -> None:
    """Take a bridge down and remove it; one that is not there is no error."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle, suppress(OSError):
        request = struct.pack("16sh14x", name.encode(), 0)
        flags: int = struct.unpack("16sh14x", fcntl.ioctl(handle, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(handle, _SIOCSIFFLAGS, struct.pack("16sh14x", name.encode(), flags & ~_IFF_UP))
        fcntl.ioctl(handle, _SIOCBRDELBR, name.encode() + b"\0")
