"""Cases under Nsight Compute: all in one child, whose every pass is one start of Python, and alone whatever that child took down."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from flashbench.errors import FlashbenchError
from flashbench.records import Case, Device, to_plain
from flashbench.run import nsight
from flashbench.run.plan import Plan
from flashbench.store.counters import Counted

START_SECONDS = 300.0
CASE_SECONDS = 60.0
"""Longest that a case may add, all passes together, to a child's time."""

Announce = Callable[[Case], None]
"""Told of each case as it has run, once a pass."""


def count_plan(plan: Plan, seed: int, announce: Announce) -> Iterator[Counted]:
    """The counters of each case of a plan. CountersUnavailable when none can be read here."""
    ncu = nsight.find_ncu()
    metrics = (*nsight.METRICS.values(), *nsight.tensor_metrics(ncu))
    for skip in plan.skips:
        yield Counted(skip.case, skip.status, skip.reason)
    yield from count_cases(ncu, metrics, plan.cases, plan.device, seed, announce)


def count_cases(
    ncu: str, metrics: Sequence[str], cases: Sequence[Case], device: Device, seed: int, announce: Announce
) -> Iterator[Counted]:
    """Each case, in their order. What goes wrong with one alone becomes its status; CountersUnavailable for what would stop all.

    A case that ended in an error, or that a crash of the child took with it, is counted again in a child of its own.
    """
    together = _count(ncu, metrics, cases, device, seed, announce)
    for case in cases:
        found = together.get(case)
        if len(cases) > 1 and (found is None or found.status == "error"):
            found = _count(ncu, metrics, [case], device, seed, announce).get(case)
        yield found or Counted(case, "error", "the child said nothing")


def _count(
    ncu: str, metrics: Sequence[str], cases: Sequence[Case], device: Device, seed: int, announce: Announce
) -> dict[Case, Counted]:
    """The cases of one child for which it, and ncu, gave an answer. Results have no names: they are told apart by their order."""
    request = json.dumps({"cases": [case.key for case in cases], "device": to_plain(device), "seed": seed})
    with tempfile.TemporaryDirectory(prefix="flashbench-") as folder:
        log = Path(folder) / "ncu.csv"
        program = [sys.executable, "-m", "flashbench.measure.counters", request]
        seconds = START_SECONDS + CASE_SECONDS * len(cases)
        answers, err = _run(nsight.command(ncu, metrics, log, program), cases, seconds, announce)
        output = log.read_text(errors="replace") if log.exists() else ""
    refused = nsight.refusal(output + err)
    if refused is not None:
        raise refused
    ok = [case for case in cases if answers.get(case, {}).get("status") == "ok"]
    found = {
        case: Counted(case, answer["status"], answer.get("reason"))
        for case, answer in answers.items()
        if answer["status"] != "ok"
    }
    if ok or len(found) < len(cases):
        said = nsight.complaint(output) or (err.strip().splitlines() or ["the child said nothing"])[-1][:300]
        try:
            results = nsight.read_csv(output)
            if len(results) != len(ok):
                raise FlashbenchError(f"Nsight Compute gave {len(results)} results for {len(ok)} ranges")
        except FlashbenchError as error:
            lost = [case for case in cases if case not in found]
            return found | {case: Counted(case, "error", f"{error}; it said: {said}") for case in lost}
        found |= {case: _counted(case, result, answers[case]) for case, result in zip(ok, results, strict=True)}
    return found


def _counted(case: Case, result: dict[str, float | None], answer: dict[str, Any]) -> Counted:
    read, written, l2, time_ns = (result.get(name) for name in nsight.METRICS.values())
    tensor = {name: value for name, value in result.items() if nsight.TENSOR.match(name) and value is not None}
    return Counted(
        case,
        "ok",
        dram_read_bytes=read,
        dram_write_bytes=written,
        l2_bytes=l2,
        time_ms=None if time_ns is None else time_ns / 1e6,
        tensor_instructions=tensor or None,
        launch=answer.get("launch"),
        backend=answer.get("backend"),
    )


def _run(
    command: Sequence[str], cases: Sequence[Case], seconds: float, announce: Announce
) -> tuple[dict[Case, dict[str, Any]], str]:
    """The last answer for each case, and standard error, of a command whose process group is killed when it takes too long."""
    by_key = {case.key: case for case in cases}
    answers: dict[Case, dict[str, Any]] = {}
    with tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=err, text=True, errors="replace", start_new_session=True
        )
        late = threading.Event()

        def kill() -> None:
            late.set()
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)

        deadline = threading.Timer(seconds, kill)
        deadline.start()
        try:
            for answer in _answers(process.stdout):
                case = by_key.get(str(answer.get("key")))
                if case is not None:
                    answers[case] = answer
                    announce(case)
        finally:
            deadline.cancel()
            if process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        err.seek(0)
        words = err.read().decode(errors="replace")
    return answers, f"no answer within {seconds:.0f} s" if late.is_set() else words


def _answers(lines: IO[str] | None) -> Iterator[dict[str, Any]]:
    """The JSON objects among the lines of the child's output, as they come."""
    for line in lines or ():
        with contextlib.suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict):
                yield answer
