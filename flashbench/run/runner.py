"""The parent: sends the plan's cases to worker processes, survives what they do, and stores every row as it finishes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from flashbench.errors import FlashbenchError
from flashbench.records import Case, Device, Row, from_plain, to_plain
from flashbench.run.plan import Plan
from flashbench.run.process import OWN, Launch, WorkerGone, WorkerProcess, WorkerSilent
from flashbench.run.spare import Spare
from flashbench.store.anchors import Anchor, append_anchors
from flashbench.store.run import RunWriter

ANCHOR_SECONDS = 120.0
"""Longest wait for the anchors of a round; a round without them goes on, and the report says what that costs."""
NO_TIMERS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Progress:
    """What just happened, for whoever draws it: a case began, entered a stage, or ended as a row."""

    case: Case
    round: int
    stage: str | None = None
    row: Row | None = None
    samples_ms: tuple[float, ...] = ()


def run_plan(
    plan: Plan, writer: RunWriter, settings: dict[str, Any], timeout_seconds: float, done: Collection[tuple[str, int]]
) -> Iterator[Progress]:
    """Visit every case in every round, except those in `done`, and yield progress. Each finished row is on disk when it is yielded."""
    with Spare() as spare:
        for round_index in range(plan.rounds):
            for skip in plan.skips:
                if (skip.case.key, round_index) not in done:
                    row = skip.row(round_index)
                    writer.append(row, ())
                    yield Progress(skip.case, round_index, row=row)
            wanted = [case for case in plan.order(round_index) if (case.key, round_index) not in done]
            coming = [OWN] * (plan.rounds - round_index - 1)
            yield from run_round(wanted, round_index, plan.device, writer, settings, timeout_seconds, spare, coming)


def run_round(
    cases: Sequence[Case],
    round_index: int,
    device: Device,
    writer: RunWriter,
    settings: dict[str, Any],
    timeout_seconds: float,
    spare: Spare,
    coming: Sequence[Launch],
    *,
    launch: Launch = OWN,
    anchors: bool = False,
    timers: Mapping[str, str] = NO_TIMERS,
) -> Iterator[Progress]:
    """One round: one worker, and a new one after each crash. Each finished row is on disk when it is yielded.

    `coming` says where the workers of the rounds after it will come from, so that spare ones can get ready. With `anchors`, the reference
    kernels are measured first, in the same process. `timers` holds the method for a case's key, where the other side of a comparison
    has already chosen it.
    """
    worker: WorkerProcess | None = None
    restarts = 0
    out_of_memory: list[Case] = []
    try:
        for case in cases:
            implied = next((c for c in out_of_memory if _at_least(case, c)), None)
            if implied is not None:
                row = Row(case, round_index, "oom", f"implied: the smaller '{implied.key}' ran out of memory")
                writer.append(row, ())
                yield Progress(case, round_index, row=row)
                continue
            yield Progress(case, round_index, stage="start")
            if worker is None:
                worker = spare.take(device, settings, launch)
                spare.prepare(device, *coming)
                if anchors and not restarts:
                    yield Progress(case, round_index, stage="anchors")
                    worker = _with_anchors(worker, round_index, writer) or spare.take(device, settings, launch)
            last: Progress | None = None
            for last in visit_case(worker, case, round_index, timeout_seconds, restarts, timers.get(case.key)):
                if last.row is not None:
                    writer.append(last.row, last.samples_ms)
                yield last
            ended = last.row.status if last is not None and last.row is not None else None
            if ended == "oom":
                out_of_memory.append(case)
            if ended in ("crashed", "timeout"):
                worker.stop()
                worker = None
                restarts += 1
    finally:
        if worker is not None:
            worker.stop()


def _with_anchors(worker: WorkerProcess, round_index: int, writer: RunWriter) -> WorkerProcess | None:
    """The worker after it has measured its anchors; None when that ended it, for a case is worth more than its anchor."""
    try:
        worker.send({"type": "anchors"})
        while True:
            message = worker.receive(ANCHOR_SECONDS)
            if message["type"] == "anchors":
                append_anchors(writer.path, round_index, [from_plain(Anchor, found) for found in message["anchors"]])
                return worker
    except (WorkerGone, WorkerSilent):
        worker.stop()
        return None


def visit_case(
    worker: WorkerProcess,
    case: Case,
    round_index: int,
    timeout_seconds: float,
    restarts: int = 0,
    timer: str | None = None,
) -> Iterator[Progress]:
    """One visit: its stages, and last its row, whatever becomes of the worker. Nothing is stored."""
    started, begun = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    stage = "start"

    def lost(status: str, reason: str) -> Progress:
        seconds = round(time.monotonic() - begun, 3)
        row = Row(case, round_index, status, reason, started=started, seconds=seconds)  # type: ignore[arg-type]
        return Progress(case, round_index, row=row)

    try:
        wanted = {"type": "case", "case": to_plain(case), "round": round_index}
        worker.send(wanted if timer is None else {**wanted, "timer": timer})
        while True:
            message = worker.receive(max(0.0, begun + timeout_seconds - time.monotonic()))
            if message["type"] == "stage":
                stage = message["stage"]
                yield Progress(case, round_index, stage=stage)
                continue
            row = from_plain(Row, message["row"])
            if restarts:
                row = _with_warning(row, f"round continued in a new worker after {restarts} crash(es)")
            yield Progress(case, round_index, row=row, samples_ms=tuple(message["samples"]))
            return
    except WorkerSilent:
        words = worker.last_stderr()
        tail = f"; its last words: {words}" if words else ""
        yield lost("timeout", f"no answer within {timeout_seconds:.0f} s, in stage '{stage}'{tail}")
    except WorkerGone as how:
        yield lost("crashed", f"in stage '{stage}' {how}")


def _with_warning(row: Row, text: str) -> Row:
    return replace(row, warnings=(*row.warnings, text))


def _at_least(case: Case, smaller: Case) -> bool:
    """Whether `case` is `smaller` with every size at least as large, so that it cannot fit where that one did not."""
    a, b = case.problem, smaller.problem
    same = case.provider == smaller.provider and (a.dtype, a.mask, a.mode) == (b.dtype, b.mask, b.mode)
    return same and all(getattr(a, name) >= getattr(b, name) for name in _SIZES)


_SIZES = ("batch", "heads_q", "heads_kv", "seq_q", "seq_kv", "head_dim", "head_dim_v")


def measure_ceilings(
    device: Device, settings: dict[str, Any], seconds: float, stage: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Ceilings of a device, measured in a worker of their own, as plain data. FlashbenchError when that fails."""
    worker = WorkerProcess().start(device, settings)
    try:
        worker.send({"type": "ceilings"})
        while True:
            message = worker.receive(seconds)
            if message["type"] == "ceilings":
                found: list[dict[str, Any]] = message["ceilings"]
                return found
            stage(message["stage"])
    except WorkerGone as how:
        raise FlashbenchError(f"the ceilings of {device.name} could not be measured: {how}") from None
    except WorkerSilent:
        raise FlashbenchError(f"the ceilings of {device.name} gave no answer within {seconds:.0f} s") from None
    finally:
        worker.stop()
