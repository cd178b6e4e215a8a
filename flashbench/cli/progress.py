"""Live progress on stderr: cases done, the current case and its stage, time left. Quiet when stderr is no terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flashbench.records import FAILED_STATUSES
from flashbench.run.runner import Progress


class Display:
    """Shows each Progress of a run; use it in a `with` statement."""

    def __init__(self, total: int, path: Path, resumable: bool = True) -> None:
        self._resumable = resumable
        self._total = total
        self._done = 0
        self._bar: Any = None
        self._task: Any = None
        self._path = path

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                BarColumn(20),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total)
        return self

    def show(self, step: Progress) -> None:
        """One step: a stage of the current case, or a finished row. Failures stay on the screen."""
        if step.row is not None:
            self._done += 1
            if step.row.status in FAILED_STATUSES:
                self._say(f"{step.row.status}: {step.row.key}: {step.row.reason}")
        if self._bar is not None:
            stage = f"{step.case.key} [dim]{step.stage or ''}[/dim]"
            self._bar.update(self._task, completed=self._done, description=stage)

    def _say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if kind is not None:
            then = f"go on with --resume {self._path}" if self._resumable else f"what is finished is in {self._path}"
            print(f"stopped after {self._done} of {self._total}; {then}", file=sys.stderr)
