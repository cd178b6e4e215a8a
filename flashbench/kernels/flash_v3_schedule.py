"""Which tiles of queries a program of flash-v3 computes, in which order, and which blocks of keys each of them takes.

Every role of a program (producer, consumers) asks these functions by itself, so that all walk over the same list and no queue is needed.
They are plain arithmetic, which tests/kernels/test_flash_v3_schedule.py runs in Python as it stands here. Who sees which key, and the order
of the list, are those of schedule.py, which every kernel of this project shares.
"""

from __future__ import annotations

from flashbench.kernels import schedule
from flashbench.kernels.gluon_names import gl, gluon

ROWS: gl.constexpr = gl.constexpr(64)
"""Queries of a consumer: as many as one warpgroup's matrix product has."""

# The same source, compiled by Gluon: a kernel of one language may not count on calling functions of the other.
dealt_by_length = gluon.jit(schedule.dealt_by_length.fn)
dealt = gluon.jit(schedule.dealt.fn)
assigned = gluon.jit(schedule.assigned.fn)
key_ranges = gluon.jit(schedule.key_ranges.fn)


@gluon.jit
def position(turn, program, programs, BACK_AND_FORTH: gl.constexpr):
    """Place in the list of tiles of a program's tile number `turn`, where `programs` programs deal the list out among themselves.

    In a list that runs from long to short every second round is dealt from the other end (BACK_AND_FORTH): who got the longest tile of one
    round gets the shortest of the next.
    """
    offset = program
    if BACK_AND_FORTH:
        offset = program + turn % 2 * (programs - 1 - 2 * program)
    return turn * programs + offset


@gluon.jit
def block_bounds(
    first_row, seq_q, seq_kv, window, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr
):  # fmt: skip
    """Blocks of keys for the tile of queries from `first_row` on, from the last to the first: end > diagonal >= steady >= low.

    Block `end - 1` comes first, masked where anything is; then those from there down to `diagonal`, masked; down to `steady`, which need no
    mask; and down to `low`, which a window's left edge cuts. A tile whose queries see no key takes one block too: nobody waits in vain.
    """
    shift = seq_kv - seq_q
    last_row = min(first_row + BLOCK_Q, seq_q) - 1
    low, steady_low, steady_high, high = key_ranges(
        shift + first_row, shift + last_row, seq_kv, window, BLOCK_KV, CAUSAL, WINDOW
    )
    end = (max(high, 1) + BLOCK_KV - 1) // BLOCK_KV
    diagonal = min(steady_high // BLOCK_KV, end - 1)
    steady = min(steady_low // BLOCK_KV, diagonal)
    return end, diagonal, steady, min(low // BLOCK_KV, steady)


@gluon.jit
def tile_at(
    place, batch_heads, seq_q, seq_kv, window, sections, group, tile_count,
    BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, LONGEST_FIRST: gl.constexpr,
):  # fmt: skip
    """The tile at a place of the list: (batch * head, first row, and the four bounds of its blocks). Behind the last it stays there."""
    head, q_block = assigned(
        min(place, tile_count - 1), batch_heads, gl.cdiv(seq_q, BLOCK_Q), sections, group, LONGEST_FIRST
    )
    first_row = q_block * BLOCK_Q
    end, diagonal, steady, low = block_bounds(first_row, seq_q, seq_kv, window, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW)
    return head, first_row, end, diagonal, steady, low


@gluon.jit
def visible(at_key, column, seq_kv, window, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """Which keys of a block its queries see, (queries, keys): `visible` of schedule.py, with positions counted from the block's first key.

    In the accumulator of a matrix product a thread holds columns 8 i + 2 (thread % 4) and the next one. Split so, the thread's share moves to
    the side of the queries (two values a thread) and what is left of the columns is known to the compiler, where 32 registers would hold it.
    """
    of_thread = (column & 6)[None, :]
    known = (column & ~6)[None, :]
    if CAUSAL:
        reach = at_key[:, None] - of_thread
        seen = known <= reach
        if WINDOW:
            seen = seen & (known > reach - window)
    else:
        seen = known < seq_kv - of_thread
    return seen
