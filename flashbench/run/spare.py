"""The next round's worker, which imports torch while this round's measures: of a short round's time that is a third.

Only beside a GPU and on a machine with cores to spare: on a CPU it would take time from what is measured. It touches no device until
it is started.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import psutil

from flashbench.records import Device
from flashbench.run.process import Launch, WorkerProcess

LEAST_CORES = 4


class Spare:
    """At most one worker that waits for its round; use it in a `with` statement, which ends what is left over."""

    def __init__(self) -> None:
        self._waiting: WorkerProcess | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drop()

    def take(self, device: Device, settings: dict[str, Any], launch: Launch) -> WorkerProcess:
        """A started worker of that launch: the waiting one, or a new one."""
        worker = self._waiting if self._waiting is not None and self._waiting.launch == launch else None
        if worker is None:
            return WorkerProcess(launch).start(device, settings)
        self._waiting = None
        return worker.start(device, settings)

    def prepare(self, device: Device, launch: Launch) -> None:
        """Have one of that launch wait, where it disturbs nothing."""
        if device.kind != "cuda" or (psutil.cpu_count() or 1) < LEAST_CORES:
            return
        if self._waiting is None or self._waiting.launch != launch:
            self._drop()
            self._waiting = WorkerProcess(launch)

    def _drop(self) -> None:
        if self._waiting is not None:
            self._waiting.stop()
            self._waiting = None
