"""One visit of one case: bind, first call, check, memory, time. Whatever happens, it ends as a row."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

import torch

from flashbench.analysis.statistics import bimodal
from flashbench.measure.check import Outcome, check_results
from flashbench.measure.crosscheck import cross_check
from flashbench.measure.energy import measure_energy
from flashbench.measure.limits import beyond_physics
from flashbench.measure.memory import measure_memory, release
from flashbench.measure.reference import Reference, make_reference
from flashbench.measure.sampling import Rule, Samples
from flashbench.measure.telemetry import Nvml, Watch
from flashbench.measure.timer import time_call
from flashbench.measure.workload import (
    Inputs,
    Operation,
    make_inputs,
    make_operation,
    matmul_precision,
    output_dtype,
    same_inputs,
)
from flashbench.providers.spec import Provider, Unsupported
from flashbench.records import Case, Device, Problem, Row, State, Timing

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Settings:
    """What holds for every case of a run."""

    rule: Rule
    seed: int = 0
    check_only: bool = False
    energy: bool = False
    cross_check: bool = False


@dataclass
class Session:
    """A worker's state between cases: the device, its telemetry, and the last problem's inputs and reference."""

    device: Device
    settings: Settings
    nvml: Nvml
    announce: Callable[[str], None] = lambda _stage: None
    _problem: Problem | None = None
    _inputs: Inputs | None = None
    _reference: Reference | None = None

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device.kind, self.device.index)

    def prepare(self, problem: Problem, computes: str = "attention") -> tuple[Inputs, Reference]:
        """Inputs and reference of a problem, computed once and shared by the providers that compute the same of it."""
        same = self._inputs is not None and (self._problem, self._inputs.computes) == (problem, computes)
        if not same or self._inputs is None or self._reference is None:
            self.forget()
            inputs = make_inputs(problem, self.settings.seed, self.torch_device, computes)
            self._reference = make_reference(problem, inputs, self.device)
            self._inputs, self._problem = inputs, problem
        return self._inputs, self._reference

    def forget(self) -> None:
        self._problem = self._inputs = self._reference = None
        release()


@dataclass
class _Draft:
    """A row while it is being made."""

    case: Case
    round: int
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    begun: float = field(default_factory=time.perf_counter)
    fields: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)
    stage: str | None = None
    entered: float = 0.0

    def enter(self, stage: str, session: Session) -> None:
        """A stage begins; the one before it has ended."""
        session.announce(stage)
        now = time.perf_counter()
        if self.stage is not None:
            self.stages[self.stage] = round(now - self.entered, 4)
        self.stage, self.entered = stage, now

    def optional(self, measure: Callable[[], T]) -> T | None:
        """The result of a pass that was asked for on top; if it fails, a warning says so, and the time that is there stays."""
        try:
            return measure()
        except Exception as error:
            self.warnings.append(f"the {self.stage} pass failed: {classify(error)[1]}")
            return None

    def finish(self, status: str, reason: str | None = None) -> Row:
        if self.stage is not None:
            self.stages[self.stage] = round(time.perf_counter() - self.entered, 4)
        return Row(
            self.case,
            self.round,
            status,  # type: ignore[arg-type]
            reason,
            tuple(self.warnings),
            self.started,
            round(time.perf_counter() - self.begun, 3),
            self.stages,
            **self.fields,
        )


def visit(case: Case, provider: Provider, round_index: int, session: Session) -> tuple[Row, list[float]]:
    """Measure `case`. Returns its row and its samples in milliseconds: none unless it was timed (ok, or invalid beyond a physical limit)."""
    draft = _Draft(case, round_index)
    try:
        with matmul_precision(case.problem.dtype):
            return _measure(draft, provider, session)
    except Unsupported as refusal:
        status, reason = "unsupported", str(refusal)
    except Exception as error:
        status, reason = classify(error)
        if status == "oom" and draft.stage in ("reference", "check"):
            reason += f" (in stage '{draft.stage}', which holds the reference too)"
    # Outside the handler: there the traceback still holds the failed call's tensors.
    if status in ("oom", "error"):
        session.forget()
    return draft.finish(status, reason), []


def _measure(draft: _Draft, provider: Provider, session: Session) -> tuple[Row, list[float]]:
    problem, device, settings = draft.case.problem, session.device, session.settings
    draft.enter("reference", session)
    inputs, reference = session.prepare(problem, provider.computes)
    draft.enter("first call", session)
    bound = provider.bind(problem, device)
    if bound.backend is not None:
        leaves = (t.detach().requires_grad_(inputs.grad_out is not None) for t in (inputs.q, inputs.k, inputs.v))
        draft.fields["backend"] = bound.backend(*leaves)  # a library may choose otherwise where gradients are wanted
    began = time.perf_counter()
    operation = make_operation(problem, bound, inputs)
    operation.run()
    _synchronize(device)
    draft.fields["first_call_ms"] = round((time.perf_counter() - began) * 1e3, 3)

    draft.enter("check", session)
    outcome = _check(problem, reference, operation, inputs, session)
    draft.fields["check"] = outcome.check
    draft.warnings += outcome.warnings
    if bound.launch is not None:
        draft.fields["launch"] = bound.launch(*inputs.arguments)
    if outcome.problem:
        session.forget()  # the provider may have written to the inputs
        return draft.finish("incorrect", outcome.problem), []
    if settings.check_only or device.triton_interpreter:
        return draft.finish("checked"), []

    draft.enter("memory", session)
    draft.fields["memory"] = measure_memory(operation.run, device)
    draft.enter("time", session)
    watch = Watch(session.nvml)
    samples = time_call(operation.run, settings.rule, device, watch.observe)
    draft.fields["state"] = watch.state()
    draft.fields["timing"] = _timing(samples, settings.rule)
    draft.warnings += samples.warnings
    if device.kind == "cuda" and session.nvml.problem is not None:
        draft.warnings.append(f"no telemetry: {session.nvml.problem}")
    if not samples.values_ms:
        return draft.finish("invalid", "no time could be read: no sample counted"), []
    draft.warnings += _doubts(samples, draft.fields["state"])
    impossible = beyond_physics(draft.case, samples.values_ms, device, provider.algorithm)
    if impossible:
        return draft.finish("invalid", impossible), samples.values_ms
    if settings.cross_check:
        draft.enter("cross-check", session)
        draft.fields["cross_check"] = draft.optional(lambda: cross_check(operation.run, settings.rule, device))
    if settings.energy:
        draft.enter("energy", session)
        energy = draft.optional(lambda: measure_energy(operation.run, device, session.nvml))
        if energy is not None:
            draft.fields["energy_j"] = energy.joules_per_call
            draft.warnings += energy.warnings
    return draft.finish("ok"), samples.values_ms


def _check(problem: Problem, reference: Reference, operation: Operation, inputs: Inputs, session: Session) -> Outcome:
    _poison([true.numel() for true in reference.true.values()], output_dtype(problem), session.torch_device)
    results = operation.results()
    again = operation.results()
    _synchronize(session.device)
    outcome = check_results(problem, reference, results, again)
    if not same_inputs(problem, session.settings.seed, inputs):
        return Outcome(outcome.check, "the provider changed its inputs", outcome.warnings)
    return outcome


def _poison(sizes: list[int], dtype: torch.dtype, device: torch.device) -> None:
    """Leave NaN in the blocks that the allocator hands out next for tensors of these sizes, so that an output not written shows."""
    blocks = [torch.full((size,), float("nan"), dtype=dtype, device=device) for size in sizes]
    del blocks  # all at once: freed one by one, one block would serve for all


def _doubts(samples: Samples, state: State | None) -> list[str]:
    """What a reader should know before believing a time."""
    found = []
    if not samples.converged:
        found.append("the median's interval did not close within the budget")
    if bimodal(samples.values_ms):
        found.append("the times fall into two groups")
    if state is not None and state.throttle_reasons:
        clocks = f": {state.sm_clock_mhz[0]} to {state.sm_clock_mhz[1]} MHz" if state.sm_clock_mhz else ""
        found.append(f"clocks were throttled ({', '.join(state.throttle_reasons)}){clocks}")
    return found


def _timing(samples: Samples, rule: Rule) -> Timing:
    return Timing(
        method=samples.method,
        l2=rule.l2,
        regime=rule.regime,
        sample_count=len(samples.values_ms),
        warmup_ms=round(samples.warmup_ms, 1),
        discarded=samples.discarded,
        duty_cycle=round(samples.duty_cycle, 3),
        converged=samples.converged,
    )


def _synchronize(device: Device) -> None:
    if device.kind == "cuda":
        torch.cuda.synchronize()


def classify(error: Exception) -> tuple[str, str]:
    """The status and the reason in words of what a provider raised."""
    message = str(error).strip().splitlines()[0] if str(error).strip() else ""
    name = type(error).__name__
    if name == "OutOfResources":  # Triton: more shared memory or registers than the device has
        return "unsupported", f"the kernel does not fit this device: {message}"
    if (
        isinstance(error, (torch.OutOfMemoryError, MemoryError))
        or "out of memory" in message
        or "can't allocate memory" in message
    ):
        return "oom", f"ran out of memory: {message[:200]}"
    where = traceback.extract_tb(error.__traceback__)[-1]
    return "error", f"{name}: {message[:300]} (in {where.name}, line {where.lineno})"
