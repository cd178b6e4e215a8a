"""The forward kernel against float64, in Triton's interpreter."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from drawn_problems import blocks, problems
from forward_runs import (
    elements_written_beyond_the_end,
    forward_errors,
    forward_values,
    order_of_work,
    said_to_walk_down,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import SMALL, AttentionProblem, attention, visible_keys

from flashbench.errors import UsageError
from flashbench.kernels.blocks import BlockShape
from flashbench.kernels.inputs import check_inputs

pytestmark = pytest.mark.interpreter

DESCRIPTORS = BlockShape(64, 64, 4, 1, descriptors=True)
POINTERS = BlockShape(64, 32, 4, 1)
WIDE_LOOPS = BlockShape(64, 32, 8, 1, descriptors=True)
by_name = pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)


def assert_close(case: AttentionProblem, interpreted: Any, blocks: BlockShape | None = None, seed: int = 0) -> None:
    found = interpreted(forward_errors, case, blocks, seed=seed)
    assert found.acceptable, found


@by_name
def test_agrees_with_plain_attention_through_descriptors(case: AttentionProblem, interpreted: Any) -> None:
    assert_close(case, interpreted, DESCRIPTORS)


@by_name
def test_agrees_with_plain_attention_through_pointers(case: AttentionProblem, interpreted: Any) -> None:
    assert_close(case, interpreted, POINTERS)


@pytest.mark.parametrize("mask", ["none", "causal", "window:33", "window:200"])
@pytest.mark.parametrize("seq", ["200", "70/128", "90/200", "200/70"])
def test_so_do_separate_loops_for_masked_blocks(seq: str, mask: str, interpreted: Any) -> None:
    """Those of two warpgroups at head dimension 256."""
    assert_close(attention("loops", "1", seq, "256/32", mask=mask), interpreted, WIDE_LOOPS)


@pytest.mark.parametrize("seq_kv", [20, 64, 100])
def test_an_infinite_value_is_infinite_in_the_output_and_not_nan(seq_kv: int, interpreted: Any) -> None:
    q, k = np.zeros((1, 2, 16, 16), np.float32), np.zeros((1, 2, seq_kv, 16), np.float32)
    v = np.ones((1, 2, seq_kv, 16), np.float32)
    v[:, :, 3, 5] = np.inf
    out, _ = interpreted(forward_values, q, k, v, dtype="fp16", blocks=DESCRIPTORS)
    assert np.isposinf(out[..., 5]).all()
    np.testing.assert_allclose(np.delete(out, 5, axis=3), 1, rtol=1e-3)


@pytest.mark.parametrize("layouts", [*itertools.product(("dense", "transposed"), repeat=3)], ids="-".join)
def test_each_tensor_may_be_token_major_on_its_own(layouts: tuple[str, str, str], interpreted: Any) -> None:
    assert_close(attention("KF-06", "4", "62", "128", layouts=layouts), interpreted)


@pytest.mark.parametrize("upper", [64, 128])
def test_channels_beyond_the_64th_count(upper: int, interpreted: Any) -> None:
    """KF-01: with all signal in the upper channels, a kernel that stops at the 64th sees none of it."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, 64, 2 * upper), dtype=np.float32) for _ in range(3))
    q[..., :upper] = k[..., :upper] = 0
    upper_half, _ = interpreted(forward_values, q[..., upper:].copy(), k[..., upper:].copy(), v, scale=0.1)
    whole, _ = interpreted(forward_values, q, k, v, scale=0.1)
    np.testing.assert_allclose(whole, upper_half, atol=1e-6)


@pytest.mark.parametrize("blocks", [DESCRIPTORS, POINTERS], ids=["descriptors", "pointers"])
@pytest.mark.parametrize("seq", ["63", "65/100", "129"])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_memory_behind_a_tensor_is_neither_read_nor_written(
    blocks: BlockShape, seq: str, mask: str, interpreted: Any
) -> None:
    case = attention(
        "KF-03", "1", seq, "40", mask=mask, layouts=("sliced",) * 3
    )  # NaN behind each row and after the last
    assert_close(case, interpreted, blocks)
    assert interpreted(elements_written_beyond_the_end, case, blocks) == 0


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_a_thousand_positions(mask: str, interpreted: Any) -> None:
    assert_close(attention("KF-03", "1", "1000", mask=mask), interpreted)


@pytest.mark.parametrize(
    ("seq_q", "seq_kv", "mask"), [(2, 5, "causal"), (5, 2, "causal"), (8, 8, "window:4"), (3, 8, "window:4")]
)
def test_the_output_shows_which_keys_each_query_sees(seq_q: int, seq_kv: int, mask: str, interpreted: Any) -> None:
    """All scores equal and V the identity: row i of the output is 1 / count at the keys that query i sees (KF-10, KF-18)."""
    q, k = np.zeros((1, 1, seq_q, 16), np.float32), np.ones((1, 1, seq_kv, 16), np.float32)
    v = np.eye(seq_kv, dtype=np.float32)[None, None]
    out, lse = interpreted(forward_values, q, k, v, mask=mask)
    seen = visible_keys(mask, seq_q, seq_kv).numpy()
    count = seen.sum(1)
    np.testing.assert_allclose(out[0, 0], seen / np.maximum(count, 1)[:, None], atol=1e-6)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse[0, 0], np.log(count), atol=1e-6)


def test_scores_below_any_finite_mask_value_keep_their_weight(interpreted: Any) -> None:
    """KF-11: scores of -61,504, all alike: row i is the mean of the first i + 1 values, and not 0."""
    q = np.full((1, 1, 32, 64), 31.0, np.float32)
    v = np.arange(32, dtype=np.float32).reshape(1, 1, 32, 1)
    out, lse = interpreted(forward_values, q, -q, v, mask="causal", scale=1.0)
    seen = np.arange(1, 33)
    np.testing.assert_allclose(out.ravel(), (seen - 1) / 2, rtol=1e-5)
    np.testing.assert_allclose(lse.ravel(), -64 * 31.0**2 + np.log(seen), rtol=1e-6)


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("scale", [0.0, -0.0, 1e-60, -1e-60, -0.5])
def test_a_scale_of_zero_gives_the_mean_and_a_negative_one_stays_finite(
    scale: float, mask: str, interpreted: Any
) -> None:
    """KF-12: the largest score times a negative scale is the smallest, and as the maximum of the row it would overflow."""
    rng = np.random.default_rng(0)
    q, k, v = (4 * rng.standard_normal((1, 1, 64, 32), dtype=np.float32) for _ in range(3))
    out, lse = interpreted(forward_values, q, k, v, mask=mask, scale=scale)
    seen = visible_keys(mask, 64, 64).numpy()
    s = np.where(seen, scale * (q[0, 0].astype(float) @ k[0, 0].T), -np.inf)
    weights = np.exp(s - s.max(1, keepdims=True))
    np.testing.assert_allclose(out[0, 0], weights @ v[0, 0] / weights.sum(1, keepdims=True), atol=2e-4)
    np.testing.assert_allclose(lse[0, 0], np.log(weights.sum(1)) + s.max(1), atol=1e-4)


def test_weights_are_multiplied_in_the_dtype_of_v(interpreted: Any) -> None:
    """KF-13: bf16 values of 1e5 are beyond fp16, in which they would be infinite."""
    assert_close(attention("KF-13", seq="128", dtype="bf16", value_magnitude=1e5), interpreted, DESCRIPTORS)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_is_refused_and_not_computed_unchecked(dtype: torch.dtype) -> None:
    """KF-16: there is no fp8 kernel here, so nothing of one may be timed."""
    x = torch.empty(1, 1, 256, 64, dtype=dtype, device="meta")
    with pytest.raises(UsageError, match="one dtype of fp16, bf16, fp32"):
        check_inputs(x, x, x)


def test_heads_of_a_group_are_neighbours(interpreted: Any) -> None:
    q, k = np.ones((1, 4, 16, 16), np.float32), np.ones((1, 2, 16, 16), np.float32)
    v = np.broadcast_to(np.arange(2, dtype=np.float32)[None, :, None, None], (1, 2, 16, 16)).copy()
    out, _ = interpreted(forward_values, q, k, v)
    np.testing.assert_allclose(out.mean((0, 2, 3)), [0, 0, 1, 1], atol=1e-6)


def test_the_worked_example_of_the_online_softmax(interpreted: Any) -> None:
    """Scores 1, 3, 2, 4, 1, 0, 5, 2 with values 1, 4, 2, 5, 3, 0, 6, 2, worked by hand in blocks of two, give 5.257."""
    scores, values = np.float32([1, 3, 2, 4, 1, 0, 5, 2]), np.float32([1, 4, 2, 5, 3, 0, 6, 2])
    k = np.zeros((1, 1, 8, 16), np.float32)
    k[..., 0] = scores
    q = np.zeros((1, 1, 1, 16), np.float32)
    q[..., 0] = 1
    out, lse = interpreted(forward_values, q, k, values.reshape(1, 1, 8, 1), scale=1.0)
    assert out.item() == pytest.approx(5.257, abs=5e-4)
    assert lse.item() == pytest.approx(np.log(np.exp(scores).sum()), rel=1e-6)


@pytest.mark.parametrize(
    ("mask", "capability", "down"),
    [("causal", (9, 0), True), ("window:9", (9, 0), True), ("causal", (8, 0), True), ("none", (9, 0), False), ("causal", (10, 0), False)],
)  # fmt: skip
def test_the_figures_of_a_launch_say_which_way_its_blocks_walk(
    mask: str, capability: tuple[int, int], down: bool, interpreted: Any
) -> None:
    assert interpreted(said_to_walk_down, mask, capability) is down


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("heads", "q_blocks", "sections", "group"),
    [(6, 5, 2, 2), (7, 3, 4, 1), (1, 4, 1, 1), (3, 1, 3, 1), (12, 9, 2, 4), (8, 8, 8, 1), (10, 4, 3, 2)],
)
def test_every_block_of_queries_is_taken_once_in_the_order_that_the_model_takes(
    heads: int, q_blocks: int, sections: int, group: int, causal: bool, interpreted: Any
) -> None:
    from flashbench.model.order import dealt

    order = interpreted(order_of_work, heads, q_blocks, sections, group, causal)
    assert sorted(order) == list(itertools.product(range(heads), range(q_blocks)))
    modelled = dealt(heads, q_blocks, sections if causal else None, group)
    assert order == [(head, q_blocks - 1 - block if causal else block) for head, block in modelled]


def test_the_longest_causal_blocks_of_a_section_come_first(interpreted: Any) -> None:
    order = interpreted(order_of_work, 4, 2, 2, 2, True)
    assert order == [(0, 1), (1, 1), (0, 0), (1, 0), (2, 1), (3, 1), (2, 0), (3, 0)]


def test_heads_that_share_keys_come_together_without_a_mask(interpreted: Any) -> None:
    order = interpreted(order_of_work, 4, 2, 1, 2, False)
    assert order == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]


def test_of_the_last_three_sections_which_are_the_larger_the_shortest_third_is_kept_for_the_end(
    interpreted: Any,
) -> None:
    order = interpreted(order_of_work, 5, 3, 4, 1, True)
    first = [(0, 2), (0, 1), (0, 0)]
    second, third = [(1, 2), (1, 1)], [(2, 2), (2, 1)]
    last = [(3, 2), (4, 2), (3, 1), (4, 1)]
    assert order == [*first, *second, *third, *last, (1, 0), (2, 0), (3, 0), (4, 0)]


quick = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@quick
@given(case=problems(), shape=blocks, seed=st.integers(0, 2**16))
def test_any_problem_in_any_blocks(interpreted: Any, case: AttentionProblem, shape: BlockShape, seed: int) -> None:
    assert_close(case, interpreted, shape, seed)


@pytest.mark.slow
@settings(quick, max_examples=100, derandomize=False)
@given(case=problems(), shape=blocks, seed=st.integers(0, 2**16))
def test_many_problems_in_any_blocks(interpreted: Any, case: AttentionProblem, shape: BlockShape, seed: int) -> None:
    assert_close(case, interpreted, shape, seed)
