"""The next rounds' workers, which import torch while this round's measures: of a short round's time that is the larger part.

Only beside a GPU and on a machine with cores to spare: on a CPU it would take time from what is measured. They touch no device until
they are started.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import psutil

from flashbench.records import Device
from flashbench.run.process import Launch, WorkerProcess

CORES_EACH = 4
MOST = 3
"""An import takes 3 to 4 s and a confirming round of two cases about 2 s, so that one waiting worker would still be waited for."""


class Spare:
    """Workers that wait for their rounds, in their order; use it in a `with` statement, which ends what is left over."""

    def __init__(self) -> None:
        self._waiting: list[WorkerProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._keep([])

    def take(self, device: Device, settings: dict[str, Any], launch: Launch) -> WorkerProcess:
        """A started worker of that launch: the one that has waited longest, or a new one."""
        worker = next((worker for worker in self._waiting if worker.launch == launch), None)
        if worker is None:
            return WorkerProcess(launch).start(device, settings)
        self._waiting.remove(worker)
        return worker.start(device, settings)

    def prepare(self, device: Device, *coming: Launch) -> None:
        """Have workers wait for the first of the launches to come, as many as disturb nothing; end those that none of them needs."""
        depth = min(MOST, (psutil.cpu_count() or 1) // CORES_EACH) if device.kind == "cuda" else 0
        missing = self._keep(coming[:depth])
        self._waiting += [WorkerProcess(launch) for launch in missing]

    def _keep(self, wanted: Sequence[Launch]) -> list[Launch]:
        """End the workers that are not wanted; the launches for which none waits."""
        missing, kept = list(wanted), []
        for worker in self._waiting:
            if worker.launch in missing:
                missing.remove(worker.launch)
                kept.append(worker)
            else:
                worker.stop()
        self._waiting = kept
        return missing
