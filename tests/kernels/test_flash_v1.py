"""The first FlashAttention's loop order against float64 and against flash-v2, in Triton's interpreter; and compiled for absent GPUs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from children import figures_of
from problems import SMALL, AttentionProblem, attention, visible_keys
from v1_runs import bytes_asked_for, difference_between_loop_orders, elements_written_astray, v1_errors, v1_values

from flashbench.kernels.blocks import BlockShape, candidate_blocks
from flashbench.kernels.flash_v1 import prepare, shared_bytes
from flashbench.model.interval import Traffic
from flashbench.model.masks import visible_range
from flashbench.model.schedule import Schedule
from flashbench.model.traffic import traffic
from flashbench.providers.table import get
from flashbench.records import Device, Problem

SQUARE = BlockShape(64, 64, 4, 1)
TALL = BlockShape(64, 16, 4, 1)
WIDE = BlockShape(16, 64, 4, 1)
CPU = Device("cpu", "a CPU", 2**34, versions={"triton": "3.6.0"})
H200 = Device("cuda", "NVIDIA H200", 150_754_820_096, capability=(9, 0), sm_count=132, versions={"triton": "3.6.0"})
in_interpreter = pytest.mark.interpreter

NAMES = (
    "head dim 128", "head dim 80, padded", "head dim of V smaller", "head dim of V larger", "129 positions, none", "129 positions, causal",
    "1 positions, causal", "200/70 queries over keys, causal", "70/200 queries over keys, window:33", "200/70 queries over keys, window:33",
    "window of 1", "window of 65", "grouped queries", "rows further apart than their length", "channels not contiguous", "scale -0.5, causal",
    "bf16, causal", "bf16 values of 1e5",
)  # fmt: skip
CHOSEN = [case for case in SMALL if case.name in NAMES]


@in_interpreter
@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
@pytest.mark.parametrize("blocks", [SQUARE, TALL], ids=["few key blocks", "many key blocks"])
def test_agrees_with_plain_attention(case: AttentionProblem, blocks: BlockShape, interpreted: Any) -> None:
    found = interpreted(v1_errors, case, blocks)
    assert found.acceptable, found


@pytest.mark.slow
@in_interpreter
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.parametrize("blocks", [SQUARE, TALL, WIDE], ids=["square", "tall", "wide"])
def test_agrees_with_plain_attention_on_every_problem(
    case: AttentionProblem, blocks: BlockShape, interpreted: Any
) -> None:
    found = interpreted(v1_errors, case, blocks)
    assert found.acceptable, found


@in_interpreter
@pytest.mark.parametrize("blocks", [TALL, WIDE], ids=["tall", "wide"])
@pytest.mark.parametrize("mask", ["none", "causal", "window:20"])
@pytest.mark.parametrize("seq", ["65/100", "100/65"])
def test_writes_nothing_astray_and_reads_no_row_that_it_has_not_written(
    seq: str, mask: str, blocks: BlockShape, interpreted: Any
) -> None:
    """What waits between key blocks starts as NaN here, which would stay for good."""
    case = attention("KF-03", "2/1", seq, "40", mask=mask, layouts=("sliced",) * 3)
    assert interpreted(elements_written_astray, case, blocks) == 0


@in_interpreter
@pytest.mark.parametrize("mask", ["none", "causal", "window:50"])
def test_both_loop_orders_give_the_same_output(mask: str, interpreted: Any) -> None:
    case = attention("both", "2", "130", "32", dtype="fp32", mask=mask)
    assert interpreted(difference_between_loop_orders, case, BlockShape(32, 32, 4, 1)) < 2e-6


@in_interpreter
@pytest.mark.parametrize(("seq_q", "seq_kv", "mask"), [(5, 40, "causal"), (40, 5, "causal"), (40, 60, "window:4")])
def test_equal_scores_show_the_mask(seq_q: int, seq_kv: int, mask: str, interpreted: Any) -> None:
    """KF-10: one-hot values make the output the visible keys, each with its share; a query without keys gives 0 and an LSE of -inf."""
    q, k = np.zeros((1, 1, seq_q, 16), np.float32), np.ones((1, 1, seq_kv, 16), np.float32)
    v = np.eye(seq_kv, dtype=np.float32)[None, None]
    out, lse = interpreted(v1_values, q, k, v, mask=mask, blocks=BlockShape(16, 16, 4, 1))
    seen = visible_keys(mask, seq_q, seq_kv).numpy()
    count = seen.sum(1)
    np.testing.assert_allclose(out[0, 0], seen / np.maximum(count, 1)[:, None], atol=1e-6)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse[0, 0], np.log(count), atol=1e-6)


@in_interpreter
def test_the_worked_example_in_blocks_that_each_normalise(interpreted: Any) -> None:
    """Scores of 16 keys a block, the largest in the last one: o was normalised by sums that turn out to weigh nothing."""
    scores = np.concatenate([np.full(16, s, np.float32) for s in (1, 3, 2, 60)])
    k, q = np.zeros((1, 1, 64, 16), np.float32), np.zeros((1, 1, 1, 16), np.float32)
    k[..., 0], q[..., 0] = scores, 1
    values = np.repeat(np.float32([1, 4, 2, 5]), 16).reshape(1, 1, 64, 1)
    out, lse = interpreted(v1_values, q, k, values, scale=1.0, blocks=BlockShape(16, 16, 4, 1))
    assert out.item() == pytest.approx(5, rel=1e-6)
    assert lse.item() == pytest.approx(60 + np.log(16), rel=1e-6)


@in_interpreter
@pytest.mark.parametrize("blocks", [SQUARE, BlockShape(32, 16, 4, 1)], ids=BlockShape.row)
@pytest.mark.parametrize("mask", ["none", "causal", "window:40"])
@pytest.mark.parametrize(("heads", "seq"), [("2", "192"), ("1", "100/150"), ("4/2", "130"), ("1", "192/64")])
def test_moves_the_bytes_that_the_model_counts_without_a_cache(
    heads: str, seq: str, mask: str, blocks: BlockShape, interpreted: Any
) -> None:
    """To the byte: every load and store of Q, K, V, O, LSE and of what waits; and the keys of its first block that no query sees."""
    case = attention("bytes", heads, seq, "24/20", mask=mask)
    schedule = Schedule(block_q=blocks.block_q, block_kv=blocks.block_kv, accumulator_bytes=4, writes_lse=True)
    unseen = visible_range(mask, case.problem.seq_q, case.problem.seq_kv, 0)[0] % blocks.block_kv
    expected = traffic("tiled-v1", case.problem, schedule=schedule).high
    assert interpreted(bytes_asked_for, case, blocks) == expected + case.problem.heads_q * unseen * (24 + 20) * 2


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_what_waits_is_read_from_hbm_only_as_far_as_the_l2_does_not_hold_it(mask: str) -> None:
    problem, schedule = Problem(4, 32, 32, 16384, 16384, 64, 64, "bf16", mask), Schedule(writes_lse=False)

    def moved(l2_bytes: int) -> Traffic:
        return traffic("tiled-v1", problem, schedule=schedule, l2_bytes=l2_bytes, sm_count=132)

    waiting = 128 * 16384 * (64 * (2 + 4) + 8)
    assert moved(waiting).estimate == moved(waiting).low
    everything = moved(0).high
    if (
        mask == "none"
    ):  # every row comes back after all others: an L2 that is a little too small holds none of them so long
        assert moved(waiting - 1).estimate == everything
    else:  # the rows that are left become fewer with every block of keys, and from some block on they fit
        assert moved(waiting // 13).estimate == pytest.approx(everything, rel=1 / 13)
        assert moved(waiting // 2).low < moved(waiting // 2).estimate < moved(waiting // 4).estimate


@pytest.mark.parametrize(
    ("changes", "device", "words"),
    [
        ({"mode": "backward"}, H200, "forward pass only"),
        ({"head_dim": 8, "head_dim_v": 8}, H200, "from 16 to 256"),
        ({"page_size": 16}, H200, "paged"),
        ({}, CPU, "TRITON_INTERPRET=1"),
        ({}, dataclasses.replace(H200, capability=(7, 5), name="Tesla T4"), "sm_80"),
    ],
)
def test_what_cannot_run_has_a_reason(changes: dict[str, Any], device: Device, words: str) -> None:
    problem = dataclasses.replace(attention("usual").problem, **changes)
    assert words in (get("flash-v1").unsupported(problem, device) or "")
    assert get("flash-v1").unsupported(attention("usual", dtype="bf16", mask="causal").problem, H200) is None


@pytest.mark.parametrize(
    ("seq_kv", "dtype", "waiting_bytes"),
    [(64, torch.float16, 4), (65, torch.float16, 2 * 32 * (16 + 2) * 4), (65, torch.float32, 2 * 32 * 2 * 4)],
    ids=["one key block", "two key blocks", "two key blocks, fp32"],
)
def test_what_waits_takes_memory_only_where_something_waits(
    seq_kv: int, dtype: torch.dtype, waiting_bytes: int
) -> None:
    """o, m and l in fp32 beside the output; an fp32 output is where its own o waits, as the memory model counts."""
    q, k = torch.empty(1, 2, 32, 16, dtype=dtype), torch.empty(1, 2, seq_kv, 16, dtype=dtype)
    launch = prepare(q, k, k, blocks=SQUARE)
    waiting = {id(tensor): tensor for tensor in launch.arguments[5:8] if tensor is not launch.out}
    assert sum(tensor.nbytes for tensor in waiting.values()) == waiting_bytes


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("dtype", ["bf16", "tf32", "fp32"])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_every_block_shape_of_the_table_has_one_stage(capability: tuple[int, int], dtype: str, head_dim: int) -> None:
    shapes = candidate_blocks(capability, dtype, head_dim, kernel="flash-v1")
    assert {shape.num_stages for shape in shapes} == {1}
    assert not any(shape.descriptors for shape in shapes)
    assert min(shared_bytes(shape, capability, dtype, head_dim, head_dim) for shape in shapes) < 227 * 1024


COMPILED: tuple[AttentionProblem, ...] = (
    *(
        attention(f"bf16 d {d} {mask}", "16", "4096", str(d), dtype="bf16", mask=mask)
        for d, mask in ((64, "none"), (64, "causal"), (128, "none"), (128, "causal"), (128, "window:1000"), (256, "causal"))
    ),
    attention("grouped queries, a tail, padded", "8/2", "1000/1100", "40", mask="none", layouts=("sliced",) * 3),
    attention("one of everything", "1", "1", "16", mask="window:1"),
    attention("fp32 d 64", "16", "4096", "64", dtype="fp32", mask="causal"),
)  # fmt: skip
MATRIX_UNITS = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}


@pytest.mark.compile
@pytest.mark.parametrize("target", MATRIX_UNITS, ids="sm_{}".format)
def test_the_default_blocks_fit_the_chip_and_use_its_matrix_unit(target: int) -> None:
    found = figures_of("v1_runs.py", COMPILED, str(target))
    assert [figures["name"] for figures in found] == [case.name for case in COMPILED]
    assert [complaint for figures in found for complaint in complaints(figures, target)] == []


def complaints(figures: dict[str, Any], target: int) -> list[str]:
    """What is wrong with a compiled kernel, in words."""
    used = figures["instructions"]
    half = figures["name"].startswith("bf16")
    # Addresses of K and V, of the loop over the keys, are what is spilled: once for many tiles. They move with the compiler's version.
    allowed_spill = {"bf16 d 64": 64, "bf16 d 128": 320}.get(" ".join(figures["name"].split()[:3]), 512)
    found = {
        f"spills {figures['spilled_bytes']} bytes": figures["spilled_bytes"] > allowed_spill,
        "more shared memory than the device has": figures["shared_bytes"] > figures["shared_limit_bytes"],
        "more shared memory than was estimated": figures["shared_bytes"] > figures["shared_estimate_bytes"],
        f"no {MATRIX_UNITS[target]}": half and not used[MATRIX_UNITS[target]],
        "products that wait for one another": figures["serialised"],
        "tiles fetched ahead of their iteration": used["LDGSTS"] > 0 or used["UTMALDG"] > 0,
        "exact fp32 on a matrix unit": figures["name"].startswith("fp32") and any(map(used.get, MATRIX_UNITS.values())),
    }
    return [f"{figures['name']}: {what} ({figures['blocks']})" for what, is_so in found.items() if is_so]
