"""The backward kernels against float64, in Triton's interpreter: both variants, each gradient on its own."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from backward_runs import (
    autograd_errors,
    autograd_says,
    backward_errors,
    compared,
    elements_written_beyond_the_end,
    gradient_of_output,
    provider_errors,
    ranges_of_queries,
    reference_gradients,
)
from drawn_problems import blocks, problems
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import LAYOUTS, SMALL, AttentionProblem, attention, inputs, visible_keys

from flashbench.kernels.blocks import BlockShape

pytestmark = pytest.mark.interpreter

VARIANTS = ("two-pass", "one-pass")
DESCRIPTORS = (BlockShape(32, 64, 4, 1, descriptors=True), BlockShape(64, 32, 4, 1, descriptors=True))
POINTERS = (BlockShape(64, 32, 4, 1), BlockShape(32, 64, 4, 1))
SPREAD = (
    "head dim 16", "head dim 256", "head dim 1, padded", "head dim 72, padded", "head dim 192, padded",
    "head dim of V smaller", "head dim of V larger", "65 positions, none", "129 positions, causal", "1 positions, causal",
    "15 positions, none", "2/5 queries over keys, causal", "5/2 queries over keys, causal", "70/200 queries over keys, none",
    "70/200 queries over keys, window:33", "200/70 queries over keys, causal", "200/70 queries over keys, window:33",
    "window of 1", "window of 65", "grouped queries", "one key/value head", "K and V packed", "channels not contiguous",
    "rows further apart than their length", "scale -0.5, causal", "scale 0.0, none", "bf16 values of 1e5", "bf16, causal", "fp32, none",
    "1/1 queries over keys in long rows", "30/1 queries over keys in long rows",
)  # fmt: skip
CASES = tuple(case for case in SMALL if case.name in SPREAD)
both = pytest.mark.parametrize("variant", VARIANTS)


def of(variant: str, shapes: tuple[BlockShape, ...]) -> tuple[BlockShape, ...]:
    return shapes if variant == "two-pass" else shapes[:1]


def assert_close(
    case: AttentionProblem, variant: str, interpreted: Any, shapes: tuple[BlockShape, ...] = DESCRIPTORS, **more: Any
) -> None:
    found = interpreted(backward_errors, case, variant, of(variant, shapes), **more)
    assert found.acceptable, found


def test_the_spread_names_problems_of_the_table() -> None:
    assert len(CASES) == len(SPREAD)


@pytest.mark.parametrize(
    ("heads", "seq", "mask"), [("4/2", "9/7", "none"), ("2/1", "6/9", "causal"), ("2", "8", "window:3")]
)
def test_the_gradients_to_compare_with_are_those_of_autograd(heads: str, seq: str, mask: str) -> None:
    case = attention("reference", heads, seq, "5/3", dtype="fp32", mask=mask, scale=0.3)
    q, k, v = (x.double().requires_grad_() for x in inputs(case))
    p = case.problem
    group = p.heads_q // p.heads_kv
    score = (q @ k.repeat_interleave(group, 1).mT * 0.3).masked_fill(~visible_keys(mask, p.seq_q, p.seq_kv), -torch.inf)
    out = torch.softmax(score, -1) @ v.repeat_interleave(group, 1)
    d_out = torch.randn_like(out)
    gradients, _ = reference_gradients(case, q.detach(), k.detach(), v.detach(), d_out)
    for got, wanted in zip(gradients, torch.autograd.grad(out, (q, k, v), d_out), strict=True):
        torch.testing.assert_close(got, wanted)


def gradients_of_one_key(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor, delta_factor: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dQ, dK and dV in fp32 where every query sees one key, so that O is V; dP is added up as a thread of a GPU does it, term by term."""
    d_p = torch.zeros(*d_out.shape[:3], 1)
    for channel in range(v.shape[3]):
        product = d_out[..., channel, None].double() * v[..., channel, None].double()
        d_p = (d_p.double() + product).float()  # one rounding: a fused multiply-add
    delta = (d_out * v).sum(-1, keepdim=True) * delta_factor
    d_s = (d_p - delta) * q.shape[3] ** -0.5
    return d_s * k, d_s.mT @ q, d_out.sum(2, keepdim=True)


@pytest.mark.parametrize("layout", ["dense", "expanded"])
@pytest.mark.parametrize("head_dim", ["4", "128", "256"])
@pytest.mark.parametrize("seq", ["1/1", "30/1"])
def test_sums_of_one_key_in_two_orders_are_rounding_and_a_part_in_ten_thousand_is_not(
    seq: str, head_dim: str, layout: str
) -> None:
    """dP and delta are then the same sum, and dQ and dK what rounding leaves of their difference: a hundred draws of it, each allowed."""
    case = attention("one key", "1", seq, head_dim, dtype="fp32")
    wrong = 0
    for seed in range(100):
        tensors = (*inputs(case, seed=seed), gradient_of_output(case, layout, "cpu"))
        found = compared(case, gradients_of_one_key(*tensors, 1.0), *tensors)
        assert found.acceptable, (seed, found)
        wrong += not compared(case, gradients_of_one_key(*tensors, 1.0001), *tensors).acceptable
    assert wrong >= 95, "delta itself may come out near 0"


@both
@pytest.mark.parametrize("seq", ["40/1", "40/2"])
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16"])
def test_a_delta_that_is_off_by_a_percent_shows_where_few_keys_are_seen(
    dtype: str, seq: str, variant: str, interpreted: Any
) -> None:
    case = attention("planted", "2", seq, "128", dtype=dtype)
    assert_close(case, variant, interpreted)
    found = interpreted(backward_errors, case, variant, of(variant, DESCRIPTORS), delta_factor=1.01)
    assert not found.acceptable, found
    assert found.norm["dv"] <= 1, "delta has no part in dV"


@both
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_plain_attention(case: AttentionProblem, variant: str, interpreted: Any) -> None:
    assert_close(case, variant, interpreted, DESCRIPTORS if variant == "two-pass" else POINTERS)


@both
def test_the_error_of_a_large_score_is_allowed_in_delta_too(variant: str, interpreted: Any) -> None:
    """A query with nearly all of its weight on one key: dP - delta is 1e-4 of either, and delta comes from the forward pass's weights."""
    case = attention("peaked", "1", "3/60", "256", dtype="fp32", scale=0.5)
    assert_close(case, variant, interpreted, seed=2)


@both
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_gradients_are_right_with_and_without_a_causal_mask(mask: str, variant: str, interpreted: Any) -> None:
    assert_close(attention("KB-01", "2", "128", mask=mask), variant, interpreted)


@both
@pytest.mark.parametrize("shapes", [DESCRIPTORS, POINTERS], ids=["descriptors", "pointers"])
@pytest.mark.parametrize("seq", ["128/77", "77/128"])
def test_padded_columns_do_not_overflow_where_scores_are_very_negative(
    seq: str, shapes: tuple[BlockShape, ...], variant: str, interpreted: Any
) -> None:
    """KB-02: a key that does not exist has score 0, and exp(0 - lse) overflows where lse is below -89."""
    assert_close(attention("KB-02", "1", seq, dtype="fp32"), variant, interpreted, shapes, score=-500.0)


@both
@pytest.mark.parametrize("seq", ["704", "640"])
def test_a_length_of_half_a_block_has_finite_gradients_under_a_mask(seq: str, variant: str, interpreted: Any) -> None:
    large = (BlockShape(128, 128, 4, 1, descriptors=True),) * 2
    assert_close(attention("KB-06", "1", seq, mask="causal", dtype="bf16"), variant, interpreted, large, score=-120.0)


@both
@pytest.mark.parametrize("layouts", [*itertools.product(("dense", "transposed"), repeat=3)], ids="-".join)
def test_each_tensor_may_be_token_major_on_its_own(
    layouts: tuple[str, str, str], variant: str, interpreted: Any
) -> None:
    """KF-06; the gradient of the output is token-major where V is."""
    assert_close(attention("KF-06", "2", "31", "32", layouts=layouts), variant, interpreted, layout=layouts[2])


@both
@pytest.mark.parametrize("layout", [*LAYOUTS, "expanded"])
def test_the_gradient_of_the_output_may_have_any_strides(layout: str, variant: str, interpreted: Any) -> None:
    """KF-05: a pre-pass that takes dO for dense reads the wrong rows. `expanded` has strides 0, as a sum's gradient has."""
    assert_close(attention("KF-05", "4/2", "33/40", "24", mask="causal"), variant, interpreted, layout=layout)


@both
@pytest.mark.parametrize("shapes", [DESCRIPTORS, POINTERS], ids=["descriptors", "pointers"])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_nothing_is_written_behind_the_gradients(
    mask: str, shapes: tuple[BlockShape, ...], variant: str, interpreted: Any
) -> None:
    case = attention("ends", "2/1", "65/100", "40", mask=mask, layouts=("sliced",) * 3)
    assert interpreted(elements_written_beyond_the_end, case, variant, of(variant, shapes)) == 0


@both
def test_autograd_gives_the_same_gradients(variant: str, interpreted: Any) -> None:
    found = interpreted(autograd_errors, attention("autograd", "4/2", "40/70", "32/16", mask="causal"), variant)
    assert found.acceptable, found


@pytest.mark.parametrize("mode", ["backward", "forward_backward"])
@pytest.mark.parametrize(("name", "passes"), [("flash-v2", ["keys", "queries"]), ("flash-v2-one-pass", ["one_pass"])])
def test_its_provider_runs_each_variant_and_tells_the_blocks_of_every_pass(
    name: str, passes: list[str], mode: str, interpreted: Any
) -> None:
    found, launch = interpreted(provider_errors, name, mode)
    assert found.acceptable, found
    assert [*launch] == ["block_q", "block_kv", *passes]
    assert launch["block_kv"] == launch[passes[0]]["block_kv"]
    assert launch["block_q"] == launch[passes[-1]]["block_q"]


def test_a_graph_is_made_only_where_a_gradient_is_asked_for(interpreted: Any) -> None:
    says = interpreted(autograd_says)
    assert says["graph with a leaf"]
    assert not says["graph without leaves"]
    assert not says["graph without grad"]
    assert says["the same output"]


def test_what_autograd_cannot_give_is_refused(interpreted: Any) -> None:
    says = interpreted(autograd_says)
    assert "once_differentiable" in says["twice"]
    assert "did you mean 'one-pass'" in says["unknown"]
    assert "d_out must be (1, 1, 16, 16)" in says["other shape"]


@given(
    seq_q=st.integers(1, 90), seq_kv=st.integers(1, 90), mask=st.sampled_from(["none", "causal", "window"]),
    window=st.integers(1, 90), block_q=st.sampled_from([16, 32]), block_kv=st.sampled_from([16, 32, 64]),
)  # fmt: skip
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_the_loops_of_a_key_block_meet_every_query_that_sees_it_and_mask_none_in_vain(
    interpreted: Any, seq_q: int, seq_kv: int, mask: str, window: int, block_q: int, block_kv: int
) -> None:
    seen = visible_keys(f"window:{window}" if mask == "window" else mask, seq_q, seq_kv).numpy()
    for first in range(0, seq_kv, block_kv):
        low, steady_low, steady_high, high = interpreted(
            ranges_of_queries, first, seq_q, seq_kv, mask, window, block_q, block_kv
        )
        masked = [(a, b) for a, b in ((low, steady_low), (steady_high, high)) if a < b]
        met = np.zeros(seq_q, dtype=bool)
        for start, end in [*masked, (steady_low, steady_high)]:
            for row in range(start, end, block_q):
                assert not met[row : row + block_q].any(), "a block of queries is met twice"
                met[row : row + block_q] = True
        assert met[seen[:, first : first + block_kv].any(1)].all()
        steady = seen[steady_low:steady_high, first : first + block_kv]
        assert steady.all()
        assert (steady_high - steady_low) % block_q == 0
        assert steady_high <= steady_low or first + block_kv <= seq_kv


quick = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
drawn = given(
    case=problems(), variant=st.sampled_from(VARIANTS), shapes=st.tuples(blocks, blocks),
    layout=st.sampled_from([*LAYOUTS, "expanded"]), seed=st.integers(0, 2**16),
)  # fmt: skip


@quick
@drawn
def test_any_problem_in_any_blocks(
    interpreted: Any, case: AttentionProblem, variant: str, shapes: Any, **more: Any
) -> None:
    assert_close(case, variant, interpreted, shapes, **more)


@pytest.mark.slow
@settings(quick, max_examples=100, derandomize=False)
@drawn
def test_many_problems_in_any_blocks(
    interpreted: Any, case: AttentionProblem, variant: str, shapes: Any, **more: Any
) -> None:
    assert_close(case, variant, interpreted, shapes, **more)
