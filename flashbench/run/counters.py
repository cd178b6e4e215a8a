"""Cases one after the other under Nsight Compute, each alone in a child of its own: a crash takes one case with it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flashbench.errors import FlashbenchError
from flashbench.records import Case, Device, to_plain
from flashbench.run import nsight
from flashbench.run.plan import Plan
from flashbench.store.counters import Counted

CASE_SECONDS = 300.0


def count_plan(plan: Plan, seed: int) -> Iterator[Counted]:
    """The counters of each case of a plan, as they come. CountersUnavailable when none can be read here."""
    ncu = nsight.find_ncu()
    metrics = (*nsight.METRICS.values(), *nsight.tensor_metrics(ncu))
    for skip in plan.skips:
        yield Counted(skip.case, skip.status, skip.reason)
    for case in plan.cases:
        yield count_case(ncu, metrics, case, plan.device, seed)


def count_case(ncu: str, metrics: Sequence[str], case: Case, device: Device, seed: int) -> Counted:
    """One case. What goes wrong with it alone becomes its status; CountersUnavailable for what would stop every case."""
    request = json.dumps({"case": case.key, "device": to_plain(device), "seed": seed})
    with tempfile.TemporaryDirectory(prefix="flashbench-") as folder:
        log = Path(folder) / "ncu.csv"
        program = [sys.executable, "-m", "flashbench.measure.counters", request]
        out, err = _run(nsight.command(ncu, metrics, log, program))
        output = log.read_text(errors="replace") if log.exists() else ""
    refused = nsight.refusal(output + err)
    if refused is not None:
        raise refused
    answer = _answer(out)
    if answer.get("status") != "ok":
        last = (err.strip().splitlines() or [""])[-1][:300]
        reason = answer.get("reason") or nsight.complaint(output) or last or "the child said nothing"
        return Counted(case, answer.get("status", "error"), reason)
    try:
        results = nsight.read_csv(output)
        if len(results) != 1:
            raise FlashbenchError(f"Nsight Compute gave {len(results)} results for one range")
    except FlashbenchError as error:
        said = nsight.complaint(output)
        return Counted(case, "error", f"{error}; it said: {said}" if said else str(error))
    return _counted(case, results[0], answer)


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


def _answer(out: str) -> dict[str, Any]:
    """The last JSON object on the child's output; each pass prints one."""
    for line in reversed(out.splitlines()):
        with contextlib.suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict):
                return answer
    return {}


def _run(command: Sequence[str]) -> tuple[str, str]:
    """Standard output and error of a command in a process group of its own, which is killed whole when it takes too long."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    )
    try:
        return process.communicate(timeout=CASE_SECONDS)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {CASE_SECONDS:.0f} s"
    finally:
        if process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
