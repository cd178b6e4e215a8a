"""Memory of a call on a CPU, from the profiler's allocation events: what the theory says, net of inputs, free of what came before."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashbench.measure.device import describe
from flashbench.measure.memory import measure_memory, release
from flashbench.measure.sampling import Rule
from flashbench.measure.telemetry import Nvml
from flashbench.measure.visit import Session, Settings, visit
from flashbench.measure.workload import make_inputs, make_operation
from flashbench.model.memory import footprint
from flashbench.model.schedule import Schedule
from flashbench.providers.spec import Provider
from flashbench.providers.table import get
from flashbench.records import Case, Device, Memory, Problem, from_plain

MIB = 2**20
SCALAR = 64
"""PyTorch may hold a number such as the scale as a tensor of its own."""
DENSE = Problem(1, 8, 8, 1024, 1024, 64, 64, "fp32")


@pytest.fixture(scope="module")
def cpu() -> Device:
    return describe("cpu")


def peak_bytes(provider: str, problem: Problem, device: Device) -> int:
    inputs = make_inputs(problem, 0, torch.device("cpu"))
    operation = make_operation(problem, get(provider).bind(problem, device), inputs)
    operation.run()
    memory = measure_memory(operation.run, device)
    assert memory is not None
    return memory.peak_bytes - memory.before_bytes


def predicted(provider: str, problem: Problem) -> int:
    spec = get(provider)
    return footprint(spec.algorithm, problem, spec.schedule).peak


def test_naive_holds_two_score_matrices_and_its_scaled_queries(cpu: Device) -> None:
    # S and P of 8 heads are 1024 x 1024 x 4 bytes x 8 = 32 MiB each, the copy of Q is 2 MiB.
    assert peak_bytes("naive", DENSE, cpu) == predicted("naive", DENSE) == 66 * MIB


@pytest.mark.parametrize(("mode", "mib"), [("forward", 68), ("backward", 130), ("forward_backward", 134)])
@pytest.mark.parametrize("mask", ["causal", "window:100"])
def test_naive_with_a_mask_holds_what_is_predicted(cpu: Device, mask: str, mode: str, mib: int) -> None:
    # Forward keeps S beside P and the output; backward has the gradient in four places while it goes back through the fill.
    problem = replace(DENSE, mask=mask, mode=mode)
    assert predicted("naive", problem) == mib * MIB
    assert peak_bytes("naive", problem, cpu) == pytest.approx(mib * MIB, abs=SCALAR)


@pytest.mark.parametrize("mode", ["backward", "forward_backward"])
def test_naive_without_a_mask_goes_back_with_one_matrix_less_on_a_cpu_than_is_predicted(cpu: Device, mode: str) -> None:
    # The prediction is a GPU's, whose softmax backward stores a product.
    problem = replace(DENSE, mode=mode)
    assert peak_bytes("naive", problem, cpu) == pytest.approx(predicted("naive", problem) - 32 * MIB, abs=SCALAR)


TILED = Schedule(block_q=256, block_kv=256, writes_lse=False, stored_blocks=True)
"""The habits of the provider `tiled`."""


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mask": "causal"},
        {"seq_q": 512, "seq_kv": 512, "head_dim": 128, "head_dim_v": 128},
        {"heads_q": 2, "heads_kv": 2, "seq_q": 2048, "seq_kv": 2048},
        {"heads_q": 2, "heads_kv": 2, "dtype": "bf16"},
    ],
)
def test_a_loop_of_library_calls_holds_four_blocks_of_scores_over_all_heads(cpu: Device, changes: dict) -> None:
    problem = replace(DENSE, **changes)
    assert peak_bytes("tiled", problem, cpu) == pytest.approx(footprint("tiled-v2", problem, TILED).peak, rel=0.05)


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_autograd_keeps_every_visible_block_of_such_a_loop(cpu: Device, mask: str) -> None:
    both, back = (replace(DENSE, mask=mask, mode=mode) for mode in ("forward_backward", "backward"))
    kept = footprint("tiled-v2", back, TILED).kept
    assert kept > 32 * MIB
    assert peak_bytes("tiled", both, cpu) == pytest.approx(footprint("tiled-v2", both, TILED).peak, rel=0.15)
    assert peak_bytes("tiled", back, cpu) == pytest.approx(footprint("tiled-v2", back, TILED).peak, rel=0.15)


def test_naive_grows_with_the_square_of_the_length_and_flash_in_proportion(cpu: Device) -> None:
    short, long = (replace(DENSE, seq_q=n, seq_kv=n) for n in (1024, 2048))
    naive = peak_bytes("naive", long, cpu) / peak_bytes("naive", short, cpu)
    flash = peak_bytes("sdpa-flash", long, cpu) / peak_bytes("sdpa-flash", short, cpu)
    assert naive == pytest.approx(4.0, rel=0.05)
    assert 1.5 < flash < 2.1


def test_flash_holds_its_output_and_row_statistics_and_little_more(cpu: Device) -> None:
    # The kernel's own blocks come on top: less than 1 MiB a thread.
    least = footprint("tiled-v2", DENSE).peak
    found = peak_bytes("sdpa-flash", DENSE, cpu)
    assert least == 2 * MIB + 8 * 1024 * 4
    assert least <= found <= least + torch.get_num_threads() * MIB


# ME-02: net of inputs


REFERENCE = Path(__file__).parents[1] / "results" / "reference" / "h200-sxm-141gb"
BACKWARD = [
    json.loads(line) for line in (REFERENCE / "20261130T014527Z-backward" / "rows.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize(
    "row", BACKWARD, ids=lambda row: Case(row["case"]["provider"], from_plain(Problem, row["case"]["problem"])).key
)
def test_a_backward_pass_held_on_an_h200_what_is_predicted(row: dict) -> None:
    """Within 3 MiB: the row statistics are padded by some, and PyTorch keeps the state of a random generator."""
    problem, provider = from_plain(Problem, row["case"]["problem"]), get(row["case"]["provider"])
    held = row["memory"]["peak_bytes"] - row["memory"]["before_bytes"]
    assert footprint(provider.algorithm, problem, provider.schedule).peak == pytest.approx(held, abs=3 * MIB)


def test_a_temporary_is_counted_and_what_was_there_before_is_not(cpu: Device) -> None:
    resident = torch.ones(64 * MIB, dtype=torch.uint8)
    memory = measure_memory(lambda: int(torch.empty(32 * MIB, dtype=torch.uint8).numel() + resident.numel()), cpu)
    assert memory is not None
    assert memory.peak_bytes - memory.before_bytes == 32 * MIB


def test_what_a_call_allocates_and_frees_twice_is_counted_once(cpu: Device) -> None:
    def call() -> None:
        for _ in range(3):
            torch.empty(16 * MIB, dtype=torch.uint8)

    memory = measure_memory(call, cpu)
    assert memory is not None
    assert memory.peak_bytes - memory.before_bytes == 16 * MIB


def test_memory_has_two_figures_what_was_live_before_and_the_peak_that_includes_it() -> None:
    memory = Memory(before_bytes=1000 * MIB, peak_bytes=1500 * MIB)
    assert memory.peak_bytes - memory.before_bytes == 500 * MIB


# ME-01: a larger call before does not show


def test_the_peak_of_an_earlier_larger_call_does_not_leak(cpu: Device) -> None:
    alone = peak_bytes("sdpa-flash", DENSE, cpu)
    peak_bytes("naive", replace(DENSE, mode="backward"), cpu)
    release()
    assert peak_bytes("sdpa-flash", DENSE, cpu) == alone


# ME-03: running out of memory


def hungry(problem: Problem, device: Device):
    """The loading half of a provider that asks for more than any machine has."""
    from flashbench.providers.spec import Bound

    return Bound(lambda q, k, v: torch.empty(1 << 55, dtype=torch.uint8) + q)


def test_running_out_of_memory_is_a_row_and_leaves_nothing_for_the_next_case(cpu: Device) -> None:
    rule = Rule("warm", min_samples=5, max_seconds=0.05, warmup_seconds=0.01, confidence_width=0.5)
    session = Session(cpu, Settings(rule), Nvml.open(None))
    small = replace(DENSE, heads_q=2, heads_kv=2, seq_q=128, seq_kv=128)
    clean, _ = visit(Case("naive", small), get("naive"), 0, session)
    provider = Provider("hungry", "test", "materialised", "", lambda _p, _d: None, f"{__name__}:hungry")
    failed, samples = visit(Case("hungry", small), provider, 0, session)
    after, _ = visit(Case("naive", small), get("naive"), 0, session)
    assert (failed.status, samples, failed.memory) == ("oom", [], None)
    assert str(1 << 55) in (failed.reason or "")
    assert (clean.status, after.status) == ("ok", "ok")
    assert clean.memory == after.memory
