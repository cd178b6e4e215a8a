"""Which tiles of queries a program of flash-v3 computes, in which order, and which blocks of keys each of them takes; in the backward pass which
keys, and which blocks of queries.

Forward, the producer asks and tells the consumers (flash_v3_queue.py); backward, where a program has one block of keys, every role asks by itself.
They are plain arithmetic, which tests/kernels/test_flash_v3_schedule.py runs in Python as it stands here. Who sees which key, and the order
of the list, are those of schedule.py, which every kernel of this project shares.
"""

from __future__ import annotations

from flashbench.kernels import schedule
from flashbench.kernels.gluon_names import gl, gluon

ROWS: gl.constexpr = gl.constexpr(64)
"""Queries of a consumer: as many as one warpgroup's matrix product has."""
KEYS: gl.constexpr = gl.constexpr(64)
"""Backward: keys of a consumer, as many for the same reason."""
HALF: gl.constexpr = gl.constexpr(64)
"""Backward: queries whose weights are in registers at one time, a block or half of one."""

# The same source, compiled by Gluon: a kernel of one language may not count on calling functions of the other.
dealt_by_length = gluon.jit(schedule.dealt_by_length.fn)
dealt = gluon.jit(schedule.dealt.fn)
assigned = gluon.jit(schedule.assigned.fn)
key_ranges = gluon.jit(schedule.key_ranges.fn)
query_ranges = gluon.jit(schedule.query_ranges.fn)


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


@gluon.jit
def query_blocks(
    first_key, seq_q, seq_kv, window, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr
):  # fmt: skip
    """Blocks of queries for the keys from `first_key` on: low <= steady <= edge <= end. Those from steady to edge need no mask.

    Queries are counted as if the last block were whole: a row that does not exist has weight 0, whatever it sees.
    """
    padded_q = gl.cdiv(seq_q, BLOCK_Q) * BLOCK_Q
    last_key = min(first_key + BLOCK_KV, seq_kv) - 1
    first, steady_first, steady_last, last = query_ranges(
        first_key, last_key, seq_kv - seq_q, padded_q, window, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW
    )
    low = first // BLOCK_Q
    end = max(gl.cdiv(last, BLOCK_Q), low)
    steady = min(max(steady_first // BLOCK_Q, low), end)
    if CAUSAL and last_key - first_key + 1 < BLOCK_KV:
        steady = end  # keys that do not exist are masked by the loop at the diagonal
    return low, steady, min(max(steady_last // BLOCK_Q, steady), end), end


@gluon.jit
def visible_queries(reach, column, key, seq_kv, window, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """Which queries of a block see which keys, (keys, queries): `visible` of schedule.py, turned.

    `reach` is where, counted from the block's first query, the first one stands that sees the key. As in `visible`, what differs by thread
    moves to the other side, so that the compiler knows the columns.
    """
    if CAUSAL:
        first = reach[:, None] - (column & 6)[None, :]
        known = (column & ~6)[None, :]
        seen = known >= first
        if WINDOW:
            seen = seen & (known < first + window)
    else:
        seen = (key < seq_kv)[:, None] & (column >= 0)[None, :]
    return seen
