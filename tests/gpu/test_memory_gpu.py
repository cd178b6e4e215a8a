"""Peak memory on a real GPU: of the measured call alone, net of what was there, and clean after running out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from flashbench.measure.device import describe, use
from flashbench.measure.memory import measure_memory, release
from flashbench.measure.sampling import Rule
from flashbench.measure.telemetry import Nvml
from flashbench.measure.visit import Session, Settings, visit
from flashbench.model.memory import footprint
from flashbench.providers.spec import Bound, Provider
from flashbench.providers.table import get
from flashbench.records import Case, Device, Problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none"),
]

MIB = 2**20
BLOCK = 2 * MIB
"""The allocator rounds large requests up to this."""
PROBLEM = Problem(1, 16, 16, 2048, 2048, 64, 64, "fp16")


@pytest.fixture(scope="module")
def device() -> Device:
    found = describe("auto")
    use(found)
    return found


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    release()
    yield
    release()


@pytest.fixture
def session(device: Device) -> Session:
    rule = Rule("warm", min_samples=5, max_seconds=0.05, warmup_seconds=0.02, confidence_width=0.2)
    return Session(device, Settings(rule), Nvml.open(None))


def temporary(mebibytes: int) -> None:
    torch.empty(mebibytes * MIB, dtype=torch.uint8, device="cuda")


def test_the_larger_peak_of_a_warm_up_does_not_show_in_the_call(device: Device) -> None:
    # ME-01
    temporary(1024)
    memory = measure_memory(lambda: temporary(256), device)
    assert memory is not None
    assert memory.peak_bytes - memory.before_bytes == pytest.approx(256 * MIB, abs=BLOCK)


def test_the_peak_is_told_with_what_was_there_before_and_without_it(device: Device) -> None:
    # ME-02
    resident = torch.empty(1024 * MIB, dtype=torch.uint8, device="cuda")
    memory = measure_memory(lambda: temporary(512), device)
    assert memory is not None
    assert memory.before_bytes == pytest.approx(resident.numel(), abs=64 * MIB)
    assert memory.peak_bytes == memory.before_bytes + 512 * MIB


def test_measuring_leaves_what_was_live_as_it_was(device: Device) -> None:
    resident = torch.empty(128 * MIB, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_allocated()
    measure_memory(lambda: torch.empty_like(resident), device)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_naive_and_flash_hold_what_the_model_says(session: Session, mask: str) -> None:
    for name in ("naive", "sdpa-flash"):
        provider, problem = get(name), replace(PROBLEM, mask=mask)
        row, _ = visit(Case(name, problem), provider, 0, session)
        assert row.memory is not None, row.reason
        expected = footprint(provider.algorithm, problem, provider.schedule).peak
        assert row.memory.peak_bytes - row.memory.before_bytes == pytest.approx(expected, rel=0.1, abs=2 * BLOCK)


def test_the_order_of_the_cases_does_not_change_their_memory(session: Session) -> None:
    # ME-01, in a session: naive's N x N matrices before flash.
    flash, naive = (Case(name, PROBLEM) for name in ("sdpa-flash", "naive"))
    alone, _ = visit(flash, get("sdpa-flash"), 0, session)
    visit(naive, get("naive"), 0, session)
    after, _ = visit(flash, get("sdpa-flash"), 0, session)
    assert alone.memory is not None
    assert after.memory is not None
    assert alone.memory.peak_bytes - alone.memory.before_bytes == after.memory.peak_bytes - after.memory.before_bytes


def hungry(problem: Problem, device: Device) -> Bound:
    """The loading half of a provider that fills half the card, keeps it, and then asks for more than the rest."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        half = torch.empty(device.memory_bytes // 2, dtype=torch.uint8, device="cuda")
        rest = torch.empty(device.memory_bytes, dtype=torch.uint8, device="cuda")
        return q + half[0] + rest[0]

    return Bound(call)


def test_running_out_of_memory_is_a_row_and_the_next_case_starts_clean(session: Session) -> None:
    # ME-03
    clean, _ = visit(Case("naive", PROBLEM), get("naive"), 0, session)
    session.forget()
    live = torch.cuda.memory_allocated()
    provider = Provider("hungry", "test", "materialised", "", lambda _p, _d: None, f"{__name__}:hungry")
    failed, samples = visit(Case("hungry", PROBLEM), provider, 0, session)
    assert (failed.status, samples, failed.memory) == ("oom", [], None)
    assert torch.cuda.memory_allocated() == live
    after, _ = visit(Case("naive", PROBLEM), get("naive"), 0, session)
    assert (clean.status, after.status) == ("ok", "ok")
    assert clean.memory == after.memory
    assert torch.cuda.memory_reserved() < session.device.memory_bytes // 4
