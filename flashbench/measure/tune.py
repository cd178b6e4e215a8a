"""One trial of a block shape, in the worker: is it right on a small problem, what did the compiler make of it, how long does it take."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from flashbench.analysis.statistics import median
from flashbench.kernels.blocks import BlockShape, compiled_figures, parse_shape
from flashbench.kernels.tunable import TUNABLE, Trial
from flashbench.measure.check import check_results
from flashbench.measure.memory import release
from flashbench.measure.reference import Reference, make_reference
from flashbench.measure.timer import time_call
from flashbench.measure.visit import Session, classify
from flashbench.measure.workload import Inputs, make_inputs
from flashbench.records import Problem, from_plain

Answer = dict[str, Any]
"""`status` (ok, incorrect, unsupported, oom, error) and `reason`; what was found where it is ok."""


def answer(message: dict[str, Any], session: Session) -> Answer:
    """What a trial gave, whatever happened to it. `message`: step (check or time), kernel, blocks as the table writes them, problem."""
    problem = from_plain(Problem, message["problem"])
    step = {"check": check, "time": measure}[message["step"]]
    try:
        return step(message["kernel"], parse_shape(message["blocks"]), problem, session)
    except Exception as error:
        status, reason = classify(error)
        return {"status": status, "reason": reason}


def check(kernel: str, blocks: BlockShape, problem: Problem, session: Session) -> Answer:
    """Compile the kernel, run it once, and hold its outputs against float64, within what plain attention in this dtype allows."""
    if session.device.triton_interpreter and problem.dtype == "bf16" and not _bf16_works():
        return {
            "status": "unsupported",
            "reason": "Triton's interpreter multiplies bf16 wrongly here; take fp16 or fp32",
        }
    need = TUNABLE[kernel].need(blocks, session.device.capability, problem.dtype, problem.head_dim, problem.head_dim_v)
    limit = session.device.shared_bytes_per_block
    if limit is not None and need > limit:
        return {
            "status": "unsupported",
            "reason": f"may need {need} bytes of shared memory, of which there are {limit}",
        }
    inputs, reference = _small(problem, session)
    trial = _bound(kernel, blocks, problem, inputs)
    for tensor in trial.outputs.values():
        tensor.fill_(math.nan)  # what the kernel leaves out must not look right by chance
    figures = compiled_figures(blocks, trial.run())
    if session.device.kind == "cuda":
        torch.cuda.synchronize()
    filled = replace(reference, true={name: reference.true[name] for name in trial.outputs})
    outcome = check_results(problem, filled, trial.outputs)
    status = "ok" if outcome.problem is None else "incorrect"
    error = outcome.check.error_norm if outcome.check else None
    return {"status": status, "reason": outcome.problem, "error_norm": error, "figures": figures}


def measure(kernel: str, blocks: BlockShape, problem: Problem, session: Session) -> Answer:
    """Time the kernel by the session's rule; its first call, in which it is compiled or loaded, is not in it."""
    inputs = _large(problem, session)
    trial = _bound(kernel, blocks, problem, inputs)
    trial.run()
    samples = time_call(trial.run, session.settings.rule, session.device)
    median_ms = median(samples.values_ms)
    if median_ms is None:
        return {"status": "error", "reason": "; ".join(samples.warnings) or "no sample counted"}
    return {
        "status": "ok",
        "median_ms": round(median_ms, 6),
        "sample_count": len(samples.values_ms),
        "method": samples.method,
        "converged": samples.converged,
    }


def _bound(kernel: str, blocks: BlockShape, problem: Problem, inputs: Inputs) -> Trial:
    return TUNABLE[kernel].bind(problem, blocks, inputs.q, inputs.k, inputs.v, inputs.grad_out)


_checked: dict[Problem, tuple[Inputs, Reference]] = {}
_timed: dict[Problem, Inputs] = {}


def _small(problem: Problem, session: Session) -> tuple[Inputs, Reference]:
    """Inputs and reference of a small problem, kept for the shapes to come."""
    if problem not in _checked:
        inputs = make_inputs(problem, session.settings.seed, session.torch_device)
        _checked[problem] = inputs, make_reference(problem, inputs, session.device)
    return _checked[problem]


def _large(problem: Problem, session: Session) -> Inputs:
    """Inputs of the problem at hand, one problem at a time: those of the last are given back first."""
    if problem not in _timed:
        _timed.clear()
        release()
        _timed[problem] = make_inputs(problem, session.settings.seed, session.torch_device)
    return _timed[problem]


def _bf16_works() -> bool:
    from flashbench.kernels.interpreter import bf16_works

    return bf16_works()
