"""The decoding kernel against float64, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from decode_runs import (
    combined,
    counters_left,
    decode_errors,
    decode_values,
    elements_written_beyond_the_end,
    launches,
    same_bits_twice,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import LAYOUTS, AttentionProblem, attention, visible_keys

from flashbench.kernels.blocks import BlockShape

pytestmark = pytest.mark.interpreter

DESCRIPTORS = BlockShape(16, 64, 4, 1, descriptors=True)
POINTERS = BlockShape(16, 32, 4, 1)

DECODING: tuple[AttentionProblem, ...] = (
    # DE-01: one query against a cache that is no multiple of a block.
    attention("one query over 20 keys", "8", "1/20", "128", batch=4),
    *(attention(f"head dim {d}", "2", "1/130", str(d)) for d in (16, 40, 64, 80, 128, 256)),
    attention("head dim of V smaller", "2", "1/130", "192/128"),
    attention("head dim of V larger", "2", "2/130", "33/96", mask="causal"),
    # DE-06: groups of query heads, of a number that is no power of two, and more rows than a tile has.
    attention("grouped queries", "6/2", "1/200", "32", batch=2),
    attention("one key/value head", "5/1", "3/200", "32", mask="causal"),
    attention("more rows than a tile", "24/1", "3/130", "16", batch=2, mask="causal"),
    # Few queries at a time, each of which sees its own number of keys; and more queries than keys.
    *(attention(f"{mask}, four queries", "4/2", "4/150", "32", mask=mask, dtype="fp32") for mask in ("none", "causal", "window:70")),
    *(attention(f"{mask}, one query", "2", "1/150", "32", mask=mask, dtype="fp32") for mask in ("causal", "window:1", "window:70")),
    attention("queries that see no key", "2", "5/2", "32", mask="causal", dtype="fp32"),
    # KF-05, KF-06: each tensor with strides of its own.
    attention("K and V packed", "4", "1/100", layouts=("dense", "packed", "packed")),
    attention("channels not contiguous", "2", "2/100", layouts=("channels-first", "dense", "channels-first"), mask="causal"),
    attention("rows further apart than their length", "2", "1/100", "40", layouts=("sliced",) * 3),
    attention("token-major tensors", "4/2", "1/100", layouts=("transposed",) * 3),
    # KF-12, KF-13.
    *(attention(f"scale {scale}", "1", "1/100", "32", dtype="fp32", scale=scale, magnitude=4.0) for scale in (-0.5, 0.0, 1.0)),
    attention("bf16 values of 1e5", "2", "1/128", dtype="bf16", value_magnitude=1e5),
    attention("bf16", "4/2", "1/130", dtype="bf16"),
)  # fmt: skip
by_name = pytest.mark.parametrize("case", DECODING, ids=lambda case: case.name)


def assert_close(case: AttentionProblem, interpreted: Any, blocks: BlockShape | None = None, **how: Any) -> None:
    found = interpreted(decode_errors, case, blocks, **how)
    assert found.acceptable, found


@by_name
def test_one_split_agrees_with_plain_attention(case: AttentionProblem, interpreted: Any) -> None:
    assert_close(case, interpreted, DESCRIPTORS, splits=1)


@by_name
def test_three_splits_agree_with_plain_attention(case: AttentionProblem, interpreted: Any) -> None:
    assert_close(case, interpreted, POINTERS, splits=3)


@by_name
def test_a_paged_cache_agrees_with_plain_attention(case: AttentionProblem, interpreted: Any) -> None:
    assert_close(case, interpreted, POINTERS, splits=2, page_size=16)


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("page_size", [1, 3, 16, 32, 40, 64, 200])
def test_pages_of_any_size_and_either_order_of_axes(page_size: int, token_major: bool, interpreted: Any) -> None:
    """Below a block, a block, several blocks, none of these; NaN in the slots behind the last key and in pages of nobody."""
    case = attention("paged", "4/2", "2/75", "40", batch=2, mask="causal")
    assert_close(case, interpreted, POINTERS, splits=2, page_size=page_size, token_major=token_major)


@pytest.mark.parametrize("blocks", [DESCRIPTORS, POINTERS], ids=["descriptors", "pointers"])
@pytest.mark.parametrize("splits", [1, 2, 5, 9])
def test_any_number_of_splits_even_more_than_there_are_blocks(
    blocks: BlockShape, splits: int, interpreted: Any
) -> None:
    assert_close(
        attention("splits", "4/2", "2/200", "32", mask="causal", dtype="fp32"), interpreted, blocks, splits=splits
    )


def test_a_log_sum_exp_is_optional(interpreted: Any) -> None:
    assert_close(attention("no lse", "2", "1/100"), interpreted, POINTERS, splits=2, with_lse=False)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("filler", [1e4, np.nan])
def test_slots_behind_the_current_length_do_not_leak(filler: float, page_size: int | None, interpreted: Any) -> None:
    """DE-07: a cache of 32 slots of which 14 are filled."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, n, 16), dtype=np.float32) for n in (1, 32, 32))
    alone, _ = interpreted(decode_values, q, k[:, :, :14], v[:, :, :14])
    k[:, :, 14:] = v[:, :, 14:] = filler
    inside, _ = interpreted(decode_values, q, k, v, lengths=[14], page_size=page_size)
    np.testing.assert_allclose(inside, alone, atol=1e-6)


@pytest.mark.parametrize("page_size", [None, 8])
def test_sequences_of_different_length_each_end_where_they_end(page_size: int | None, interpreted: Any) -> None:
    """All scores equal and V the identity shows which keys count; splits beyond the end of the short ones are empty, without NaN."""
    q, k = np.zeros((4, 1, 2, 16), np.float32), np.ones((4, 1, 96, 16), np.float32)
    v = np.broadcast_to(np.eye(96, dtype=np.float32), (4, 1, 96, 96)).copy()
    lengths = [96, 5, 1, 0]
    out, lse = interpreted(
        decode_values, q, k, v, lengths=lengths, page_size=page_size, mask="causal", splits=3, blocks=POINTERS
    )
    for sequence, length in enumerate(lengths):
        seen = np.pad(visible_keys("causal", 2, length).numpy(), ((0, 0), (0, 96 - length)))
        count = seen.sum(1)
        np.testing.assert_allclose(out[sequence, 0], seen / np.maximum(count, 1)[:, None], atol=1e-6)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(lse[sequence, 0], np.log(count), atol=1e-6)


def test_one_query_with_a_causal_mask_sees_the_whole_cache(interpreted: Any) -> None:
    """DE-02: aligned top-left it would see the first key only."""
    q, k = np.zeros((1, 1, 1, 16), np.float32), np.ones((1, 1, 8, 16), np.float32)
    out, _ = interpreted(decode_values, q, k, np.eye(8, dtype=np.float32)[None, None], mask="causal")
    np.testing.assert_allclose(out.ravel(), np.full(8, 1 / 8), atol=1e-6)


def test_parts_are_weighed_by_natural_logarithms(interpreted: Any) -> None:
    """DE-04: states of 3,072 and 64 keys; taken to base 2, their sums would be off by 4e-3."""
    rng = np.random.default_rng(0)
    scores, values = rng.standard_normal((1, 3136)), rng.standard_normal((3136, 64))

    def state(keys: slice) -> tuple[np.ndarray, np.ndarray]:
        weights = np.exp(scores[:, keys])
        return weights @ values[keys] / weights.sum(), np.log(weights.sum(1))

    (first, first_lse), (second, second_lse), (whole, whole_lse) = map(
        state, (slice(3072), slice(3072, 3136), slice(3136))
    )
    out, lse = interpreted(combined, np.stack([first, second], 1), np.stack([first_lse, second_lse], 1))
    np.testing.assert_allclose(out, whole, atol=1e-6)
    np.testing.assert_allclose(lse, whole_lse, atol=1e-6)


def test_the_log_sum_exp_of_splits_is_that_of_one(interpreted: Any) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 2, n, 16), dtype=np.float32) for n in (1, 300, 300))
    one_out, one_lse = interpreted(decode_values, q, k, v, splits=1)
    out, lse = interpreted(decode_values, q, k, v, splits=5)
    np.testing.assert_allclose(out, one_out, atol=1e-6)
    np.testing.assert_allclose(lse, one_lse, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 3, 64, 65, 200])
def test_any_number_of_parts_is_added_up(count: int, interpreted: Any) -> None:
    rng = np.random.default_rng(count)
    parts, lse = rng.standard_normal((3, count, 80)), rng.standard_normal((3, count)) * 5
    lse[1, 1:] = -np.inf  # all but one split saw no key
    lse[2] = -np.inf
    parts[lse == -np.inf] = 0
    out, total = interpreted(combined, parts, lse)
    weights = np.exp(lse[:2] - np.log(np.exp(lse[:2]).sum(1, keepdims=True)))
    np.testing.assert_allclose(out[:2], np.einsum("rs,rsd->rd", weights, parts[:2]), atol=1e-5)
    np.testing.assert_allclose(total[:2], np.log(np.exp(lse[:2]).sum(1)), atol=1e-5)
    assert not out[2].any()
    assert total[2] == -np.inf


MANY_PARTS = attention("64 rows of one head", "64/1", "1/600", "128", mask="causal")
FEW_PARTS = attention("grouped queries", "10/2", "3/200", "40", batch=2, mask="causal")


def test_the_last_program_adds_up_few_parts_and_a_second_kernel_many(interpreted: Any) -> None:
    """A single program would be long about many: 3 splits of 64 rows of 128 channels are 96 KiB, 2 are 64."""
    assert interpreted(launches, FEW_PARTS, 3) == interpreted(launches, MANY_PARTS, 2) == 1
    assert interpreted(launches, MANY_PARTS, 3) == 2


@pytest.mark.parametrize("splits", [2, 3])
def test_both_agree_with_plain_attention(splits: int, interpreted: Any) -> None:
    assert_close(MANY_PARTS, interpreted, POINTERS, splits=splits)
    assert interpreted(elements_written_beyond_the_end, MANY_PARTS, POINTERS, splits) == 0


def test_a_launch_leaves_its_counters_0_for_those_that_use_them_next(interpreted: Any) -> None:
    assert interpreted(counters_left, FEW_PARTS, 3) == 0


def test_each_sequence_of_a_batch_gets_its_own_parts(interpreted: Any) -> None:
    """DE-05: a batch stride left out when adding up would fold every sequence onto the first."""
    q, k = np.ones((3, 2, 1, 16), np.float32), np.ones((3, 2, 64, 16), np.float32)
    v = np.broadcast_to(np.arange(3, dtype=np.float32)[:, None, None, None], (3, 2, 64, 16)).copy()
    out, _ = interpreted(decode_values, q, k, v, splits=4, blocks=BlockShape(16, 16, 4, 1))
    np.testing.assert_allclose(out.mean((1, 2, 3)), [0, 1, 2], atol=1e-6)


@pytest.mark.parametrize("page_size", [None, 16])
def test_heads_of_a_group_are_neighbours(page_size: int | None, interpreted: Any) -> None:
    """DE-06: heads 0, 0, 1, 1, not 0, 1, 0, 1."""
    q, k = np.ones((1, 4, 2, 16), np.float32), np.ones((1, 2, 48, 16), np.float32)
    v = np.broadcast_to(np.arange(2, dtype=np.float32)[None, :, None, None], (1, 2, 48, 16)).copy()
    out, _ = interpreted(decode_values, q, k, v, splits=2, page_size=page_size)
    np.testing.assert_allclose(out.mean((0, 2, 3)), [0, 0, 1, 1], atol=1e-6)


@pytest.mark.parametrize("blocks", [DESCRIPTORS, POINTERS], ids=["descriptors", "pointers"])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_memory_behind_a_tensor_is_neither_read_nor_written(
    blocks: BlockShape, splits: int, mask: str, interpreted: Any
) -> None:
    case = attention("KF-03", "3/1", "2/100", "40", mask=mask, layouts=("sliced",) * 3)  # NaN behind each row
    assert_close(case, interpreted, blocks, splits=splits)
    assert interpreted(elements_written_beyond_the_end, case, blocks, splits) == 0


def test_two_calls_give_the_same_bits(interpreted: Any) -> None:
    assert interpreted(same_bits_twice, attention("twice", "4/2", "2/200", "32", mask="causal"), 4)


def test_scores_below_any_finite_mask_value_keep_their_weight(interpreted: Any) -> None:
    q = np.full((1, 1, 1, 64), 31.0, np.float32)
    k = np.repeat(-q, 40, axis=2)
    v = np.arange(40, dtype=np.float32).reshape(1, 1, 40, 1)
    out, lse = interpreted(decode_values, q, k, v, scale=1.0, splits=2)
    assert out.item() == pytest.approx(19.5, rel=1e-5)
    assert lse.item() == pytest.approx(-64 * 31.0**2 + np.log(40), rel=1e-6)


layouts = st.sampled_from(LAYOUTS)
masks = st.one_of(st.sampled_from(["none", "causal"]), st.integers(1, 90).map("window:{}".format))
blocks = st.builds(BlockShape, st.just(16), st.sampled_from([16, 32, 64]), st.just(4), st.just(1), st.booleans())
problems = st.builds(
    lambda group, heads_kv, seq, dim, **rest: attention("drawn", f"{group * heads_kv}/{heads_kv}", seq, dim, **rest),
    group=st.integers(1, 5),
    heads_kv=st.integers(1, 2),
    seq=st.builds("{}/{}".format, st.integers(1, 5), st.integers(1, 130)),
    dim=st.builds("{}/{}".format, st.integers(1, 70), st.integers(1, 70)),
    batch=st.integers(1, 2),
    dtype=st.sampled_from(["fp16", "bf16", "fp32"]),
    mask=masks,
    layouts=st.tuples(layouts, layouts, layouts),
    scale=st.one_of(st.none(), st.floats(-1, 1)),
)
ways = st.fixed_dictionaries(
    {
        "splits": st.one_of(st.none(), st.integers(1, 7)),
        "page_size": st.one_of(st.none(), st.integers(1, 70), st.sampled_from([16, 32, 64])),
        "token_major": st.booleans(),
        "seed": st.integers(0, 2**16),
    }
)
quick = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@quick
@given(case=problems, shape=blocks, how=ways)
def test_any_problem_in_any_splits_and_pages(
    interpreted: Any, case: AttentionProblem, shape: BlockShape, how: dict[str, Any]
) -> None:
    assert_close(case, interpreted, shape, **how)


@pytest.mark.slow
@settings(quick, max_examples=100, derandomize=False)
@given(case=problems, shape=blocks, how=ways)
def test_many_problems_in_any_splits_and_pages(
    interpreted: Any, case: AttentionProblem, shape: BlockShape, how: dict[str, Any]
) -> None:
    assert_close(case, interpreted, shape, **how)
