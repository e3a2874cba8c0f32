"""Why an address cannot be listened on, and what to do about it."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from gateway_embedded.listen_address import binding_fault


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)), "address already in use; end what uses it, or "),
        (OSError(errno.EACCES, os.strerror(errno.EACCES)), "permission denied; choose a port that this user may "),
        (OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL)), "cannot assign requested address; choose an"),
        (OSError("no number"), "no number; choose another address with --listen"),
        (OSError(), "oserror; choose another address with --listen"),
    ],
)
def test_what_to_do_fits_the_cause(error: OSError, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(socket.socket, "bind", refuse)
    found = binding_fault("127.0.0.1", 1)
    assert found.startswith(fault)
    assert "--listen" in found


def test_an_address_that_is_free_has_no_fault() -> None:
    assert binding_fault("127.0.0.1", 0) == ""
