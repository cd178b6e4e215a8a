"""The replay of a launch through an L2: what is read again, and what of the sums is pushed out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashbench.model import l2 as l2_model
from flashbench.model.l2 import L2, Block, Stream, chunk_rows, heads_to_replay, replay, stream_key

ROW = 512
ROWS = 1024
HEAD = ROW * ROWS


def blocks(heads: int, per_head: int, own: int = 0) -> list[Block]:
    return [Block(head, 0, ROWS, own, own) for head in range(heads) for _ in range(per_head)]


def again(
    l2_bytes: int, launch: list[Block], slots: int, partitions: int = 1, sm_count: int = 8, down: bool = False
) -> int:
    l2 = L2(l2_bytes, partitions)
    replay(l2, launch, [Stream(ROW)], slots, sm_count, 64, down=down)
    return l2.again


def test_blocks_that_run_together_read_their_rows_once() -> None:
    assert again(HEAD // 4, blocks(1, 8), slots=8) == 0


@pytest.mark.parametrize("waves", [2, 3, 5])
def test_each_later_wave_reads_again_what_the_l2_has_lost(waves: int) -> None:
    assert again(HEAD // 4, blocks(1, 8 * waves), slots=8) == (waves - 1) * HEAD


def test_a_later_wave_finds_what_the_l2_holds() -> None:
    assert again(2 * HEAD, blocks(1, 16), slots=8) == 0


def test_a_head_whose_blocks_lie_in_two_waves_is_read_twice_and_others_once() -> None:
    assert again(HEAD // 4, blocks(4, 6), slots=8) == 2 * HEAD  # 8 of 24: heads 1 and 2 are cut, head 0 and 3 are not


def test_what_blocks_own_pushes_out_what_they_share() -> None:
    fits = 2 * HEAD
    assert again(fits, blocks(1, 16, own=HEAD), slots=8) > again(fits, blocks(1, 16), slots=8) == 0


def test_rows_that_both_sides_read_take_the_place_of_two() -> None:
    assert again(HEAD + HEAD // 2, blocks(1, 16), slots=8, partitions=1) == 0
    assert again(HEAD + HEAD // 2, blocks(1, 16), slots=8, partitions=2) == HEAD


def test_a_chunk_that_is_read_again_leaves_no_later_for_that() -> None:
    l2 = L2(3, 1)
    for key in (0, 1, 0, 2, 0):  # 0 has come first, and was read last
        l2.load(0, key, 1)
    l2.load(0, 3, 1)
    assert l2.again == 0
    l2.load(0, 1, 1)
    assert l2.again == 0
    l2.load(0, 0, 1)
    assert l2.again == 1


def test_blocks_that_go_down_end_with_the_rows_that_shorter_ones_want() -> None:
    """A long block fills the cache, and a short one follows: downwards it finds the first rows, upwards they have gone."""
    launch = [Block(0, 0, ROWS, 0, 0), Block(0, 0, ROWS // 4, 0, 0)]
    assert again(HEAD // 2, launch, slots=1, down=True) == 0
    assert again(HEAD // 2, launch, slots=1) == HEAD // 4


def test_blocks_drift_apart_so_that_late_waves_read_less_than_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that a wave of 8 cuts between two waves are read twice while waves are in step, and once when they are not."""
    launch, size = blocks(400, 6), HEAD * 5 // 4
    drifting = again(size, launch, slots=8)
    monkeypatch.setattr(l2_model, "LAG", 0.0)
    in_step = again(size, launch, slots=8)
    assert 0 < drifting < in_step / 2


def test_blocks_that_go_over_more_than_a_partition_holds_are_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = blocks(4, 8 * 50)
    found = again(HEAD // 2, launch, slots=8)
    monkeypatch.setattr(l2_model, "LAG", 0.0)
    assert found == again(HEAD // 2, launch, slots=8) == 4 * 49 * HEAD


def test_sums_are_read_and_written_once_for_each_time_that_they_are_pushed_out() -> None:
    l2 = L2(HEAD // 4, 2)
    replay(l2, blocks(1, 24), [Stream(ROW, adds=True)], 8, 8, 64)
    assert l2.again == 2 * HEAD  # three waves; the first makes them
    assert 2 * HEAD < l2.spilled <= 3 * HEAD  # the last of the third still lie in the L2


def test_sums_lie_in_one_partition() -> None:
    l2 = L2(HEAD + HEAD // 8, 2)
    replay(l2, blocks(1, 24), [Stream(ROW, adds=True)], 8, 8, 64)
    assert (l2.again, l2.spilled) == (0, 0)


@given(
    rows=st.integers(64, 2000),
    per_head=st.integers(1, 5),
    heads=st.integers(1, 4),
    slots=st.integers(1, 9),
    partitions=st.sampled_from([1, 2]),
    size=st.sampled_from([1, 10_000, 100_000, 10_000_000]),
)
def test_no_more_is_read_again_than_every_block_reads(
    rows: int, per_head: int, heads: int, slots: int, partitions: int, size: int
) -> None:
    launch = [Block(head, 0, rows, 0, 0) for head in range(heads) for _ in range(per_head)]
    l2 = L2(size, partitions)
    replay(l2, launch, [Stream(ROW)], slots, slots, 64)
    chunks = -(-rows // 64)
    assert 0 <= l2.again <= heads * (per_head - 1) * chunks * 64 * ROW


def test_chunks_are_finer_for_longer_rows_only_as_far_as_the_cache_asks() -> None:
    capacity = 30e6
    assert chunk_rows(600, [Stream(ROW)], capacity) == 64
    assert chunk_rows(16384, [Stream(ROW)], capacity) == 1024
    assert chunk_rows(524288, [Stream(ROW)], capacity) == 4096  # 2 MB, of which a partition holds more than eight


def test_a_launch_of_many_heads_is_replayed_in_part() -> None:
    assert heads_to_replay(1000, 32, 132) == 198  # 48 waves
    assert heads_to_replay(8, 32, 132) == 8


def test_neighbouring_chunks_lie_in_different_partitions() -> None:
    assert stream_key(1, 5, 2) % 2 != stream_key(1, 5, 3) % 2
