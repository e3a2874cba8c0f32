"""Telling systemd how the service stands (sd_notify): one datagram to the socket that `NOTIFY_SOCKET` names."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE: Final = "NOTIFY_SOCKET"


def notify(message: str, environment: Mapping[str, str] | None = None) -> bool:
    """Send a message such as `READY=1`; whether anybody was there to hear it. Never raises: nobody depends on it.

    Args:
        message: Assignments, separated by line breaks.
        environment: The process's environment.
    """
    name = (os.environ if environment is None else environment).get(VARIABLE, "")
    if not name.startswith(("/", "@")):
        return False
    # A leading @ stands for the zero byte of an abstract socket's name.
    address = f"\0{name[1:]}" if name.startswith("@") else name
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            sender.sendto(message.encode(), address)
    except OSError:
        return False
    return True
