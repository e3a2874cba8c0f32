"""How long work tells of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console


class ImageProgress(Protocol):
    """Listens to image work. Amounts are in the unit of the step: bytes when loading, files when building."""

    def started(self, step: str, total: int | None) -> None:
        """Report that a step begins.

        Args:
            step: What is done, fit for a line on a terminal; also the step's identity.
            total: The amount of work, or None when it is not known.
        """

    def advanced(self, step: str, amount: int) -> None:
        """Report that ``amount`` more of a step is done."""

    def finished(self, step: str) -> None:
        """Report that a step ended well."""


class SilentProgress:
    """Progress that nobody watches."""

    def started(self, step: str, total: int | None) -> None:
        """Ignore the begin of a step."""

    def advanced(self, step: str, amount: int) -> None:
        """Ignore an advance."""

    def finished(self, step: str) -> None:
        """Ignore the end of a step."""


class TerminalProgress:
    """A progress bar a step; on something that is no terminal, nothing but one line a finished step."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def started(self, step: str, total: int | None) -> None:
        """Show a bar for the step."""
        self._tasks[step] = self._bars.add_task(step, total=total)

    def advanced(self, step: str, amount: int) -> None:
        """Move the step's bar."""
        self._bars.advance(self._tasks[step], amount)

    def finished(self, step: str) -> None:
        """Fill the step's bar."""
        task = self._bars.tasks[self._tasks[step]]
        total = task.total if task.total is not None else 1
        self._bars.update(self._tasks[step], total=total, completed=total)
        if not self._console.is_terminal:
            self._console.print(f"{step}: done", highlight=False)
