"""The one definition of the mask against brute force."""

import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashbench.errors import UsageError
from flashbench.model.masks import (
    key_blocks,
    query_blocks,
    seeing_range,
    visible_pairs,
    visible_range,
    visible_tiles,
)

unhurried = settings(deadline=None)
ALIGNMENTS = ("bottom-right", "top-left")
LIMIT = 33


def sees(mask, seq_q, seq_kv, alignment, i, j):
    """The mask as a person would draw it."""
    if mask == "none":
        return True
    diagonal = i + (seq_kv - seq_q if alignment == "bottom-right" else 0)
    if j > diagonal:
        return False
    return mask == "causal" or j > diagonal - int(mask.removeprefix("window:"))


def shapes(masks=("none", "causal", "window:1", "window:2", "window:7", "window:33", "window:100")):
    return {
        "mask": st.sampled_from(masks),
        "seq_q": st.integers(1, LIMIT),
        "seq_kv": st.integers(1, LIMIT),
        "alignment": st.sampled_from(ALIGNMENTS),
    }


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("mask", ["none", "causal", "window:1", "window:3", "window:16", "window:40"])
def test_the_closed_form_counts_what_brute_force_counts_for_every_shape_up_to_33(mask, alignment):
    for seq_q in range(1, LIMIT + 1):
        for seq_kv in range(1, LIMIT + 1):
            drawn = 0
            for i in range(seq_q):
                row = [j for j in range(seq_kv) if sees(mask, seq_q, seq_kv, alignment, i, j)]
                drawn += len(row)
                first, end = visible_range(mask, seq_q, seq_kv, i, alignment)
                assert list(range(first, end)) == row
            assert visible_pairs(mask, seq_q, seq_kv, alignment) == drawn


@unhurried
@given(**shapes())
def test_reading_the_mask_by_columns_gives_the_same_pairs_as_by_rows(mask, seq_q, seq_kv, alignment):
    for j in range(seq_kv):
        first, end = seeing_range(mask, seq_q, seq_kv, j, alignment)
        assert list(range(first, end)) == [i for i in range(seq_q) if sees(mask, seq_q, seq_kv, alignment, i, j)]


@unhurried
@given(**shapes(), block_q=st.integers(1, 9), block_kv=st.integers(1, 9))
def test_a_tile_is_visible_when_one_of_its_pairs_is(mask, seq_q, seq_kv, alignment, block_q, block_kv):
    drawn = {
        (i // block_q, j // block_kv)
        for i in range(seq_q)
        for j in range(seq_kv)
        if sees(mask, seq_q, seq_kv, alignment, i, j)
    }
    assert visible_tiles(mask, seq_q, seq_kv, block_q, block_kv, alignment) == len(drawn)


@unhurried
@given(**shapes(), block=st.integers(1, 9))
def test_a_blocks_range_holds_exactly_what_its_rows_see(mask, seq_q, seq_kv, alignment, block):
    for k, (first, end) in enumerate(key_blocks(mask, seq_q, seq_kv, block, alignment)):
        rows = range(k * block, min((k + 1) * block, seq_q))
        seen = {j for i in rows for j in range(seq_kv) if sees(mask, seq_q, seq_kv, alignment, i, j)}
        assert set(range(first, end)) == seen
    for k, (first, end) in enumerate(query_blocks(mask, seq_q, seq_kv, block, alignment)):
        columns = range(k * block, min((k + 1) * block, seq_kv))
        seeing = {i for j in columns for i in range(seq_q) if sees(mask, seq_q, seq_kv, alignment, i, j)}
        assert set(range(first, end)) == seeing


@unhurried
@given(seq_q=st.integers(1, 500), seq_kv=st.integers(1, 500))
def test_a_window_as_wide_as_the_keys_is_the_causal_mask(seq_q, seq_kv):
    assert visible_pairs(f"window:{seq_kv}", seq_q, seq_kv) == visible_pairs("causal", seq_q, seq_kv)


@unhurried
@given(seq_q=st.integers(1, 500), seq_kv=st.integers(1, 500), width=st.integers(1, 600))
def test_the_last_query_sees_the_last_w_keys_itself_included(seq_q, seq_kv, width):
    assert visible_range(f"window:{width}", seq_q, seq_kv, seq_q - 1) == (max(0, seq_kv - width), seq_kv)


def test_both_alignments_agree_when_the_problem_is_square():
    assert visible_pairs("causal", 100, 100, "top-left") == visible_pairs("causal", 100, 100) == 100 * 101 // 2


def test_top_left_hides_all_but_the_first_keys_from_few_queries():
    assert visible_pairs("causal", 128, 4096, "top-left") == 128 * 129 // 2
    assert visible_pairs("causal", 128, 4096) == 128 * 129 // 2 + 128 * (4096 - 128)


def test_a_query_before_the_first_key_sees_none():
    assert visible_range("causal", 4, 2, 0) == (0, 0)


def test_a_million_queries_are_counted_at_once_exactly_and_without_memory():
    # FL-07
    n, w = 1_048_576, 4096
    tracemalloc.start()
    started = time.process_time()
    counted = visible_pairs(f"window:{w}", n, n)
    seconds = time.process_time() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert counted == w * (w + 1) // 2 + (n - w) * w
    assert isinstance(counted, int)
    assert peak < 16_384
    assert seconds < 0.05


def test_an_unknown_alignment_names_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'top-left'"):
        visible_pairs("causal", 4, 4, "topleft")
