"""The commands of ``./dev``."""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import TYPE_CHECKING

from devtools import interruption
from devtools.console import say
from devtools.environment import ROOT, child_environment
from devtools.errors import DevError, Interrupted
from devtools.foreground import run_foreground

if TYPE_CHECKING:
    from collections.abc import Callable

_DESCRIPTION = "OpenShell-Docker: one door to the repository."
_DEMO = "Launch a sandbox on Docker, kill its supervisor, and show why it ended."
_SIDE_BY_SIDE = ("-n", "auto", "--maxprocesses", "4", "--dist", "loadfile")
"""How the whole suite runs: a process for each processor, each file in one. What pytest is told after it counts."""
_EPILOG = "Exit codes: 0 done, 1 failed, 2 wrong use, 3 the machine lacks something (the text says what to do)."


def demo(arguments: list[str]) -> int:
    """Run the demo with an engine and the images."""
    own = argparse.ArgumentParser(prog="./dev demo", description=_DEMO)
    own.add_argument("--json", action="store_true", help="print the same as one JSON object, last on standard output")
    own.add_argument("--keep-logs", metavar="FOLDER", help="copy the logs of gateway and driver to this folder")
    own.parse_args(arguments)  # before anything is started for what is not understood anyway
    from devtools.prepared import prepared_engine

    # The demo proves by itself that nothing of its own is left; what others do on the engine meanwhile is theirs.
    with prepared_engine(is_shared=True) as prepared:
        images = prepared.images
        command = [sys.executable, "-m", "examples.demo"]
        command += ["--workload-image", images.workload.reference, "--runtime-image", images.runtime.reference]
        command += ["--supervisor-image", images.supervisor.reference, *arguments]
        return run_foreground(command, prepared.environment())


def test(arguments: list[str]) -> int:
    """Run pytest, with an engine and the images unless told otherwise."""
    own = argparse.ArgumentParser(
        prog="./dev test",
        description="Everything else is passed to pytest; paths are relative to the repository. Without one, the whole "
        "suite runs, on all processors; -n 0 has it run in one process.",
    )
    own.add_argument("--no-engine", action="store_true", help="skip what needs a Docker Engine")
    own.add_argument(
        "--shared-engine",
        action="store_true",
        help="others use the engine meanwhile: look only for leftovers that carry this run's label",
    )
    own.add_argument(
        "--slow", action="store_true", help="run the slow tests too, such as a kill at every step of every verb"
    )
    options, rest = own.parse_known_args(arguments)
    chosen = [] if options.slow or "-m" in rest else ["-m", "not slow"]
    if not any(_is_test_path(argument) for argument in rest):
        chosen += _SIDE_BY_SIDE
    command = [sys.executable, "-m", "pytest", *chosen, *rest]
    if options.no_engine:
        return run_foreground(command, child_environment() | {"OPENSHELL_TEST_NO_ENGINE": "1"})
    from devtools.docker_registry import have_registry
    from devtools.prepared import prepared_engine

    registry = have_registry()
    with prepared_engine(is_shared=options.shared_engine) as prepared:
        code = run_foreground(command, prepared.environment() | registry | {"OPENSHELL_REQUIRE_ENGINE": "1"})
    return code or (1 if prepared.changes else 0)


def _is_test_path(argument: str) -> bool:
    return not argument.startswith("-") and (ROOT / argument.partition("::")[0]).exists()


def check(arguments: list[str]) -> int:
    """Run every gate, or the named ones."""
    from devtools.checks import CHECKS, run_checks

    own = argparse.ArgumentParser(prog="./dev check")
    own.add_argument("names", nargs="*", metavar="check", help=", ".join(check.name for check in CHECKS))
    names: list[str] = own.parse_args(arguments).names
    unknown = set(names) - {check.name for check in CHECKS}
    if unknown:
        own.error(f"no such check: {', '.join(sorted(unknown))}")
    return run_checks(names)


def proto(arguments: list[str]) -> int:
    """Generate the code from the contracts."""
    from devtools import protogen

    argparse.ArgumentParser(prog="./dev proto").parse_args(arguments)
    say("generating code from proto/")
    try:
        protogen.generate()
    except protogen.GenerationError as error:
        raise DevError(str(error)) from error
    return 0


def lock(arguments: list[str]) -> int:
    """Make the lock file anew."""
    from devtools.lockfile import relock

    argparse.ArgumentParser(prog="./dev lock").parse_args(arguments)
    say("resolving the requirements into requirements.lock")
    relock(ROOT)
    subprocess.run(["git", "--no-pager", "diff", "--stat", "--", "requirements.lock"], cwd=ROOT, check=False)
    return 0


def images(arguments: list[str]) -> int:
    """Build the images into the cache, and load them into the engine where asked."""
    from devtools import prepared

    own = argparse.ArgumentParser(prog="./dev images")
    own.add_argument(
        "--load",
        action="store_true",
        help="load them into the engine that answers and leave them there; prints their references as lines of the "
        "driver's configuration file",
    )
    options = own.parse_args(arguments)
    built = prepared.build_images()
    if options.load:
        prepared.load_into_engine(built)
        print(f'supervisor_image = "{built.supervisor.reference}"')
        print(f'sandbox_runtime_image = "{built.runtime.reference}"')
        print(f'default_image = "{built.workload.reference}"')
        return 0
    for image in (built.workload, built.runtime, built.supervisor):
        print(f"{image.reference}\t{image.archive_path}")
    return 0


def bench(arguments: list[str]) -> int:
    """Run one benchmark with an engine and the images."""
    from devtools.prepared import prepared_engine

    available = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if not path.stem.startswith("_"))
    own = argparse.ArgumentParser(prog="./dev bench", description="Everything else is passed to the benchmark.")
    own.add_argument("name", nargs="?", default="driver", choices=available or None)
    options, rest = own.parse_known_args(arguments)
    with prepared_engine() as prepared:
        command = [sys.executable, "-m", f"benchmarks.{options.name}", *rest]
        return run_foreground(command, prepared.environment())


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "demo": demo,
    "test": test,
    "check": check,
    "proto": proto,
    "images": images,
    "bench": bench,
    "lock": lock,
}


def main(arguments: list[str]) -> int:
    """Run one command.

    Returns:
        The exit code.
    """
    listing = "\n".join(f"  {name:8}{(function.__doc__ or '').splitlines()[0]}" for name, function in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="./dev",
        description=f"{_DESCRIPTION}\n\ncommands:\n{listing}",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=list(COMMANDS), metavar="command")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="…", help="see ./dev <command> --help")
    try:
        interruption.install()
        options = parser.parse_args(arguments)
        return COMMANDS[options.command](options.arguments)
    except DevError as error:
        say(str(error))
        return error.exit_code
    except Interrupted as interrupted:
        say("interrupted")
        return interrupted.exit_code
