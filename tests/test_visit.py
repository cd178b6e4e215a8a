"""One visit of one case, in this process: what its row says."""

from __future__ import annotations

import pytest
import torch

from flashbench.measure import visit as module
from flashbench.measure.sampling import Rule
from flashbench.measure.telemetry import Nvml
from flashbench.measure.visit import Session, Settings, visit
from flashbench.providers.naive import bind as naive
from flashbench.providers.spec import Bound, Provider
from flashbench.records import Case, Device, Problem, Row

CPU = Device("cpu", "processor", 1 << 34)


def bind(problem: Problem, device: Device) -> Bound:
    """Naive attention, whose backend is said to depend on whether gradients are wanted."""
    return Bound(naive(problem, device).call, backend=lambda q, _k, _v: "training" if q.requires_grad else "inference")


CHOOSY = Provider("choosy", "user", "materialised", "", lambda _problem, _device: None, f"{__name__}:bind")


def row_of(mode: str) -> Row:
    session = Session(CPU, Settings(Rule(), check_only=True), Nvml(None, "none here"))
    case = Case("choosy", Problem(1, 2, 2, 8, 8, 4, 4, "fp32", mode=mode))
    return visit(case, CHOOSY, 0, session)[0]


@pytest.mark.parametrize(
    ("mode", "backend"), [("forward", "inference"), ("backward", "training"), ("forward_backward", "training")]
)
def test_the_backend_is_asked_for_with_the_inputs_that_the_mode_runs_on(mode: str, backend: str) -> None:
    row = row_of(mode)
    assert (row.status, row.backend) == ("checked", backend)


def test_memory_that_the_reference_lacks_is_not_blamed_on_the_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 GiB")

    monkeypatch.setattr(module, "make_reference", too_large)
    row = row_of("forward")
    assert row.status == "oom"
    assert "in stage 'reference'" in row.reason


def test_an_optional_pass_that_fails_is_a_warning_and_the_time_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the counter went away")

    monkeypatch.setattr(module, "measure_energy", broken)
    rule = Rule("warm", min_samples=3, max_seconds=0.02, warmup_seconds=0.0, confidence_width=0.5)
    session = Session(CPU, Settings(rule, energy=True), Nvml(None, "none here"))
    row, samples_ms = visit(Case("choosy", Problem(1, 2, 2, 8, 8, 4, 4, "fp32")), CHOOSY, 0, session)
    assert (row.status, row.energy_j) == ("ok", None)
    assert len(samples_ms) >= 3
    assert any("the energy pass failed: RuntimeError: the counter went away" in warning for warning in row.warnings)


def test_memory_handed_out_before_the_check_holds_nan_for_every_output() -> None:
    # Allocators promise nothing; that none of twenty tries finds three poisoned blocks would mean that nothing is poisoned.
    def poisoned() -> bool:
        module._poison([3072] * 3, torch.float32, torch.device("cpu"))
        return all(bool(torch.isnan(t).any()) for t in [torch.empty(3072) for _ in range(3)])

    assert any(poisoned() for _ in range(20))
