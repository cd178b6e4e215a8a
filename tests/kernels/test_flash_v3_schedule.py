"""Who computes which tile and reads which block in flash-v3: the functions that run on the GPU, run in Python as they stand there."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from problems import visible_keys
from v3_runs import needs_gluon

needs_gluon()

from flashbench.kernels import flash_v3_schedule, schedule  # noqa: E402 - only where it can be imported


def in_python(function: Any, **names: Any) -> Callable[..., Any]:
    """A kernel function as plain Python, with `names` in place of what it finds around it."""
    return types.FunctionType(function.fn.__code__, {**function.fn.__globals__, **names})


TL = types.SimpleNamespace(minimum=min, maximum=max, cdiv=lambda a, b: -(-a // b))
position = in_python(flash_v3_schedule.position)
visible = in_python(flash_v3_schedule.visible)
key_ranges = in_python(schedule.key_ranges, tl=TL)
block_bounds = in_python(flash_v3_schedule.block_bounds, key_ranges=key_ranges)

dealt = in_python(schedule.dealt, dealt_by_length=in_python(schedule.dealt_by_length, tl=TL))
assigned = in_python(schedule.assigned, dealt=dealt)

lengths = st.integers(1, 700)
masks = st.one_of(st.sampled_from(["none", "causal"]), st.integers(1, 800).map("window:{}".format))


def taken_by(program: int, programs: int, tiles: int, back_and_forth: bool) -> list[int]:
    """Places of the tiles that a program computes: on until it is behind the last."""
    places = itertools.takewhile(
        lambda place: place < tiles,
        (position(turn, program, programs, back_and_forth) for turn in itertools.count()),
    )
    return list(places)


@given(programs=st.integers(1, 140), tiles=st.integers(1, 900), back_and_forth=st.booleans())
def test_every_tile_is_computed_once(programs: int, tiles: int, back_and_forth: bool) -> None:
    taken = [place for program in range(programs) for place in taken_by(program, programs, tiles, back_and_forth)]
    assert sorted(taken) == list(range(tiles))


def test_dealing_back_and_forth_gives_every_program_as_much_of_a_list_from_long_to_short() -> None:
    programs, rounds = 132, 8
    longest = programs * rounds

    def work(program: int) -> int:
        return sum(longest - place for place in taken_by(program, programs, longest, True))

    assert len({work(program) for program in range(programs)}) == 1


@given(
    heads_kv=st.integers(1, 5), group=st.integers(1, 4), sections=st.integers(1, 6), seq_q=lengths, seq_kv=lengths,
    longest_first=st.booleans(), behind=st.integers(0, 300),
)  # fmt: skip
def test_every_query_of_every_head_is_in_one_tile_and_behind_the_last_tile_there_is_no_other(
    heads_kv: int, group: int, sections: int, seq_q: int, seq_kv: int, longest_first: bool, behind: int
) -> None:
    block_q, heads = 128, heads_kv * group
    blocks = -(-seq_q // block_q)
    there = types.SimpleNamespace(cdiv=TL.cdiv)
    tile_at = in_python(flash_v3_schedule.tile_at, gl=there, assigned=assigned, block_bounds=block_bounds)
    sizes = (heads, seq_q, seq_kv, 0, min(sections, heads_kv), group, heads * blocks)
    tiles = [tile_at(place, *sizes, block_q, 128, True, False, longest_first) for place in range(heads * blocks)]
    found = [tile[:2] for tile in tiles]
    assert tile_at(heads * blocks + behind, *sizes, block_q, 128, True, False, longest_first) == tiles[-1]
    assert sorted(found) == [(head, block * block_q) for head in range(heads) for block in range(blocks)]


def bounds(
    first_row: int, seq_q: int, seq_kv: int, mask: str, block_q: int, block_kv: int
) -> tuple[int, int, int, int]:
    window = int(mask.removeprefix("window:")) if mask.startswith("window:") else None
    inside = window is not None and window < seq_kv
    return block_bounds(first_row, seq_q, seq_kv, window or 0, block_q, block_kv, mask != "none", inside)


@given(lengths, lengths, masks, st.sampled_from([128, 192]), st.sampled_from([64, 128]), st.integers(0, 5))
def test_the_blocks_of_a_tile_hold_every_visible_key_and_those_without_a_mask_nothing_else(
    seq_q: int, seq_kv: int, mask: str, block_q: int, block_kv: int, tile: int
) -> None:
    first_row = tile % -(-seq_q // block_q) * block_q
    end, diagonal, steady, low = bounds(first_row, seq_q, seq_kv, mask, block_q, block_kv)
    assert end > diagonal >= steady >= low >= 0
    seen = visible_keys(mask, seq_q, seq_kv)[first_row : first_row + block_q]
    assert not seen[:, : low * block_kv].any()
    assert not seen[:, end * block_kv :].any()
    assert seen[:, steady * block_kv : diagonal * block_kv].all()
    assert diagonal * block_kv <= seq_kv


@given(lengths, lengths, masks)
def test_no_tile_takes_blocks_that_all_its_queries_are_blind_to(seq_q: int, seq_kv: int, mask: str) -> None:
    end, _, _, low = bounds(0, seq_q, seq_kv, mask, 128, 64)
    seen = visible_keys(mask, seq_q, seq_kv)[:128]
    for block in range(low, end):
        assert seen[:, block * 64 : (block + 1) * 64].any() or end - low == 1


def test_a_tile_without_a_visible_key_takes_one_block() -> None:
    end, diagonal, steady, low = bounds(0, 500, 100, "causal", 128, 128)
    assert (end, diagonal, steady, low) == (1, 0, 0, 0)


@given(lengths, lengths, masks, st.sampled_from([64, 128]), st.integers(0, 11), st.integers(0, 11))
def test_a_masked_block_shows_what_the_definition_of_the_mask_shows(
    seq_q: int, seq_kv: int, mask: str, block_kv: int, rows: int, block: int
) -> None:
    first_row, first_key = rows * 64 % seq_q, block * block_kv % seq_kv // block_kv * block_kv
    window = int(mask.removeprefix("window:")) if mask.startswith("window:") else 0
    at_key = seq_kv - seq_q + np.arange(first_row, min(first_row + 64, seq_q)) - first_key
    seen = visible(at_key, np.arange(block_kv), seq_kv - first_key, window, mask != "none", window > 0)
    expected = np.zeros((len(at_key), block_kv), dtype=bool)
    there = visible_keys(mask, seq_q, seq_kv)[first_row : first_row + 64, first_key : first_key + block_kv]
    expected[:, : there.shape[1]] = there
    assert (np.broadcast_to(seen, expected.shape) == expected).all()
