from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from devtools.errors import PreconditionError
from devtools.foreground import run_foreground

if TYPE_CHECKING:
    from pathlib import Path

CHILD = """
import os, signal, sys
received = []
signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
os.kill(os.getppid(), signal.SIGTERM)
signal.pause() if not received else None
print("cleaned up after", received, flush=True)
sys.exit(5)
"""

PARENT = """
import sys
from devtools import interruption
from devtools.errors import Interrupted
from devtools.foreground import run_foreground
interruption.install()
try:
    run_foreground([sys.executable, "-c", sys.argv[1]], {})
except Interrupted as interrupted:
    print("interrupted by", interrupted.signal_number)
"""


@pytest.mark.parametrize(("script", "code"), [("raise SystemExit(0)", 0), ("raise SystemExit(7)", 7)])
def test_the_exit_code_is_the_commands(script: str, code: int) -> None:
    assert run_foreground([sys.executable, "-c", script], os.environ) == code


def test_a_death_by_signal_is_told_as_a_shell_does() -> None:
    script = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert run_foreground([sys.executable, "-c", script], os.environ) == 128 + signal.SIGKILL


def test_a_program_that_is_not_there_is_a_precondition() -> None:
    with pytest.raises(PreconditionError, match="no such program"):
        run_foreground(["no-such-program-here"], os.environ)


def test_a_signal_to_us_alone_is_passed_on_and_the_command_cleans_up_first(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PARENT, CHILD], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        f"cleaned up after [{signal.SIGTERM:d}]",
        f"interrupted by {signal.SIGTERM:d}",
    ]


def test_our_own_signal_mask_is_as_before() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    run_foreground([sys.executable, "-c", ""], os.environ)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_the_command_is_asked_to_end_when_we_are_killed() -> None:
    child = "import signal, sys; print('up', flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", PARENT, child], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        parent.kill()
        # The end of the pipe means that the command, which holds its other end, is gone too.
        assert parent.stdout.read() == b""
