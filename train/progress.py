"""A progress bar with the remaining time and a few figures of the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Advance(Protocol):
    """Moves a progress bar."""

    def __call__(self, steps: int = 0, note: str | None = None) -> None:
        """Advance by ``steps`` and, if given, replace the note at the end of the line."""
        ...


@contextmanager
def progress_bar(title: str, total: int, done: int = 0, *, shown: bool = True) -> Iterator[Advance]:
    """Show ``title`` with a bar of ``total`` steps, ``done`` of which were taken before."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, speed_estimate_period=120, disable=not shown) as progress:
        task = progress.add_task(title, total=total, completed=done, note="")

        def advance(steps: int = 0, note: str | None = None) -> None:
            progress.update(task, advance=steps)
            if note is not None:
                progress.update(task, note=note)

        yield advance
