"""Trials of block shapes: compiled and checked in several workers at once, then timed in one, in turn and round by round."""

from __future__ import annotations

import os
import queue
import random
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flashbench.analysis.ranking import rank
from flashbench.kernels.blocks import BlockShape
from flashbench.records import Device, Problem, to_plain
from flashbench.run.process import OWN, WorkerGone, WorkerProcess, WorkerSilent
from flashbench.run.spare import Spare
from flashbench.run.tune import Entry, checks

CHECK_SECONDS = 120.0
"""Longest that compiling and checking a shape on one problem may take."""
TIME_SECONDS = 60.0
RULE = {
    "l2": "cold",
    "regime": "isolated",
    "min_samples": 8,
    "confidence_width": 0.005,
    "max_seconds": 0.1,
    "warmup_seconds": 0.03,
}
"""How a trial is timed: a fifth of a second each, since what counts is the difference between shapes timed in turn."""
MOST_SPILLS = 256
"""Spilled words a thread beyond which a shape is not timed. Some spill outside of the long loop and lose nothing."""
HOPELESS = 1.4
"""A shape this much slower than the best on the problems so far is not timed on the rest."""
MOST_WORKERS = 12


@dataclass(frozen=True, slots=True)
class Found:
    """What one trial gave: see `measure.tune.Answer`. `round` is None for a check."""

    entry: Entry
    shape: BlockShape
    problem: Problem
    round: int | None
    answer: dict[str, Any]

    @property
    def dropped(self) -> str | None:
        """Why the shape is out of the race, or None."""
        status, reason = self.answer["status"], self.answer.get("reason")
        if status != "ok":
            return f"{status}: {reason}"
        spills = self.answer.get("figures", {}).get("spills", 0)
        return f"spills {spills} words a thread" if spills > MOST_SPILLS else None


def workers() -> int:
    """How many check at once: a compiler each, on most of the cores."""
    return max(1, min(MOST_WORKERS, (os.cpu_count() or 1) * 3 // 4))


def check_all(tuned: Sequence[Entry], device: Device, settings: dict[str, Any]) -> Iterator[Found]:
    """Compile and check every shape, several workers at a time; a shape that hangs or crashes takes only its worker with it.

    What follows of a shape that is out is left out.
    """
    jobs: queue.SimpleQueue[tuple[Entry, BlockShape, Problem]] = queue.SimpleQueue()
    total = 0
    for entry in tuned:
        for job in checks(entry, device.kind):
            jobs.put(job)
            total += 1
    found: queue.Queue[Found | BaseException | None] = queue.Queue()
    stopped = threading.Event()
    lost: set[tuple[Entry, BlockShape]] = set()

    def serve() -> None:
        worker: WorkerProcess | None = None
        try:
            while not stopped.is_set():
                try:
                    entry, shape, problem = jobs.get_nowait()
                except queue.Empty:
                    return
                if (entry, shape) in lost:
                    found.put(None)
                    continue
                worker = worker or WorkerProcess().start(device, settings)
                answer = _ask(worker, "check", entry, shape, problem, CHECK_SECONDS, stopped)
                if answer["status"] in ("crashed", "timeout"):
                    worker.stop()
                    worker = None
                one = Found(entry, shape, problem, None, answer)
                if one.dropped:
                    lost.add((entry, shape))
                found.put(one)
        except BaseException as error:
            found.put(error)
        finally:
            if worker is not None:
                worker.stop()

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(min(total, workers()))]
    for thread in threads:
        thread.start()
    try:
        for _ in range(total):
            one = found.get()
            if isinstance(one, BaseException):
                raise one
            if one is not None:
                yield one
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


def time_all(
    tuned: Sequence[Entry],
    dropped: Collection[tuple[Entry, BlockShape]],
    device: Device,
    settings: dict[str, Any],
    rounds: int,
) -> Iterator[Found]:
    """Time the shapes that are left, in turn on each problem; every round in a fresh worker and an order of its own."""
    out = set(dropped)
    times_ms: dict[Entry, dict[BlockShape, dict[Problem, list[float]]]] = {entry: {} for entry in tuned}
    work = [(entry, problem) for entry in tuned for problem in entry.problems]
    with Spare() as spare:
        for number in range(rounds):
            worker: WorkerProcess | None = None
            try:
                for entry, problem in work:
                    order = [shape for shape in entry.shapes if (entry, shape) not in out]
                    random.Random(f"{number} {problem.label}").shuffle(order)
                    for shape in order:
                        worker = worker or spare.take(device, settings, OWN)
                        if number + 1 < rounds:
                            spare.prepare(device, OWN)
                        answer = _ask(worker, "time", entry, shape, problem, TIME_SECONDS)
                        if answer["status"] in ("crashed", "timeout"):
                            worker.stop()
                            worker = None
                        if answer["status"] == "ok":
                            times_ms[entry].setdefault(shape, {}).setdefault(problem, []).append(answer["median_ms"])
                        else:
                            out.add((entry, shape))
                        yield Found(entry, shape, problem, number, answer)
                    out |= {(entry, shape) for shape, ratio in rank(times_ms[entry]) if ratio > HOPELESS}
            finally:
                if worker is not None:
                    worker.stop()


def _ask(
    worker: WorkerProcess,
    step: str,
    entry: Entry,
    shape: BlockShape,
    problem: Problem,
    seconds: float,
    stopped: threading.Event | None = None,
) -> dict[str, Any]:
    """The worker's answer, or what became of it instead."""
    deadline = time.monotonic() + seconds
    try:
        worker.send(
            {"type": "tune", "step": step, "kernel": entry.kernel, "blocks": shape.row(), "problem": to_plain(problem)}
        )
        while True:
            try:
                return worker.receive(min(0.5, max(0.0, deadline - time.monotonic())))
            except WorkerSilent:
                if time.monotonic() >= deadline or (stopped is not None and stopped.is_set()):
                    return {"status": "timeout", "reason": f"no answer within {seconds:.0f} s"}
    except WorkerGone as how:
        return {"status": "crashed", "reason": str(how)}
