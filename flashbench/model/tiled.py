"""HBM bytes of the tiled algorithms, in which no score reaches HBM, in both loop orders; and of decoding.

Sizes: d, d_v head dimensions, s bytes of an element. `R` below are rows counted over blocks, `R0` rows counted once.
"""

from __future__ import annotations

import functools
import itertools

from flashbench.model.interval import Cache, Traffic, lengths, streamed
from flashbench.model.l2 import L2, Block, Stream, chunk_rows, heads_to_replay, replay, stream_key
from flashbench.model.masks import key_blocks, query_blocks
from flashbench.model.order import dealt, of_all_heads, section_count
from flashbench.model.schedule import Schedule
from flashbench.model.tensors import LSE_BYTES, compulsory_bytes, seeing_queries, seen_keys, tensors, transposed_bytes
from flashbench.records import Problem

STATISTICS_BYTES = 8
"""The first FlashAttention keeps m and l apart, fp32 each."""


def forward_q_outer(problem: Problem, cache: Cache, schedule: Schedule) -> Traffic:
    """FlashAttention-2 forward: a block holds its queries and runs over the keys; Q read once, O written once.

    K and V are read again where a replay of the launch finds them gone from the L2 (model/l2.py); on a device that is not described,
    by each *wave* of blocks, those of a wave being in step. (Dao 2023, algorithm 1.) A V that is transposed is written once more and
    read once more, but for what the second kernel finds in the L2.
    """
    p, t = problem, tensors(problem)
    lse = t.rows * LSE_BYTES * schedule.writes_lse
    once = compulsory_bytes(p, "forward")
    own = schedule.block_q * (t.q_row + t.o_row)
    again, most = _keys_again(
        p, cache, schedule, schedule.blocks_per_sm, own, down=schedule.walks_down and p.mask != "none"
    )
    copy = transposed_bytes(p, schedule)
    copied = copy * cache.handed_over(copy)
    return Traffic(
        once, round(once + lse + again + 2 * copied), once + lse + most + 2 * copy, round(t.o + lse + copied)
    )


@functools.lru_cache(maxsize=1024)
def _keys_again(
    p: Problem, cache: Cache, schedule: Schedule, blocks_per_sm: int, own: int, *, down: bool = False
) -> tuple[float, int]:
    """Bytes of K and V beyond the first read of each when blocks of queries, `own` bytes each, go over them: estimate, and no reuse."""
    t = tensors(p)
    row, first = t.k_row + t.v_row, seen_keys(p)
    ranges = key_blocks(p.mask, p.seq_q, p.seq_kv, schedule.block_q)
    most = t.kv_heads * (t.group * lengths(ranges) - first) * row
    slots = cache.places(blocks_per_sm)
    if not (cache.l2_bytes and cache.sm_count and slots):
        return t.kv_heads * (streamed(ranges, t.group, slots) - first) * row, most
    sm_count, l2_bytes, group, sections = cache.sm_count, cache.l2_bytes, 1, None
    if schedule.longest_first:
        group = t.group
        if p.mask != "none":
            sections, ranges = section_count(t.kv_heads, p.seq_kv * row, l2_bytes), ranges[::-1]
    if p.mask == "none" and _stays(len(ranges) * t.group, p.seq_kv * row, own, slots, l2_bytes // cache.l2_partitions):
        return 0.0, most

    def replayed(heads: int, sections: int | None) -> tuple[float, float]:
        blocks = [
            Block(head // t.group, *ranges[number], own // 2, own // 2)
            for head, number in dealt(heads, len(ranges), sections, group)
        ]
        streams, l2 = (Stream(row),), L2(l2_bytes, cache.l2_partitions)
        replay(l2, blocks, streams, slots, sm_count, chunk_rows(p.seq_kv, streams, l2.capacity), down=down)
        return l2.again, l2.spilled

    again, _ = of_all_heads(replayed, t.q_heads, heads_to_replay(t.q_heads, len(ranges), slots), group, sections)
    return min(most, again), most


def _stays(blocks: int, head_bytes: int, own: int, slots: int, capacity: int) -> bool:
    """Whether a partition holds what comes into it while the `blocks` of a head run: of heads in turn, and half of what blocks have of their own.

    Blocks are of one length, so that no more than `slots` others start meanwhile.
    """
    meanwhile = blocks + slots
    return (meanwhile // blocks + 2) * head_bytes + meanwhile * own // 2 <= capacity


def forward_kv_outer(problem: Problem, cache: Cache, schedule: Schedule) -> Traffic:
    """FlashAttention (v1) forward: one block per head holds a key block at a time and runs over the queries.

    K and V are read once. Q, O and the row statistics are read for every key block that sees them, in whole query blocks, and O and the
    statistics written back; the first pass finds nothing to read, and the last one writes O as an output and leaves no statistics. What
    comes between two passes of a row is what the heads that run together go over meanwhile. (Dao et al. 2022, algorithm 1: Θ(N²d²/M)
    accesses.)
    """
    p, t = problem, tensors(problem)
    kept_row = p.head_dim_v * schedule.accumulator_bytes + STATISTICS_BYTES
    moved_row = t.q_row + 2 * kept_row
    together = min(t.q_heads, cache.places(schedule.blocks_per_sm) or t.q_heads)
    passes, through_hbm = 0, 0.0
    for (_, end_before), (first, end) in itertools.pairwise(_query_tiles(p, schedule)):
        again = t.q_heads * max(0, min(end_before, end) - first) * moved_row
        passes += again
        through_hbm += cache.cycled(again, together * (end - first) * (t.q_row + kept_row))
    once = compulsory_bytes(p, "forward")
    lse = t.rows * LSE_BYTES * schedule.writes_lse
    kv_again = (t.group - 1) * t.kv_heads * seen_keys(p) * (t.k_row + t.v_row)  # the heads of a group run together
    written = t.o + lse + through_hbm * kept_row / moved_row
    return Traffic(once, round(once + lse + through_hbm), once + lse + passes + kv_again, round(written))


def _query_tiles(p: Problem, schedule: Schedule) -> list[tuple[int, int]]:
    """Queries [first, end) that each key block meets, in whole query blocks."""
    size = schedule.block_q
    blocks = query_blocks(p.mask, p.seq_q, p.seq_kv, schedule.block_kv)
    return [(first // size * size, min(-(-end // size) * size, p.seq_q)) for first, end in blocks if end > first]


def backward_one_block(problem: Problem, cache: Cache, schedule: Schedule) -> Traffic:
    """FlashAttention (v1) backward, the loops of its forward: K, V, dK, dV once; Q, dO, the statistics and dQ for every key block.

    Delta is taken when O and dO are first read; the first pass finds no dQ to read and the last writes it in its final form.
    (Dao et al. 2022, algorithm 4.)
    """
    p, t = problem, tensors(problem)
    blocks = query_blocks(p.mask, p.seq_q, p.seq_kv, schedule.block_kv)
    again = lengths(blocks) - seeing_queries(p)
    row = t.q_row + t.o_row + 2 * LSE_BYTES
    dq_row = p.head_dim * schedule.accumulator_bytes
    passes = t.q_heads * again * (row + 2 * dq_row)
    waiting = min(t.q_heads, cache.places(schedule.backward_blocks_per_sm) or t.q_heads) * p.seq_q * (row + dq_row)
    once = _backward_once(p)
    delta = t.rows * LSE_BYTES
    kv_again = 2 * (t.group - 1) * t.kv_heads * seen_keys(p) * (t.k_row + t.v_row)
    written = t.q + t.k + t.v + delta + cache.cycled(t.q_heads * again * dq_row, waiting)
    estimate = once + delta + cache.cycled(passes, waiting)
    return Traffic(once, round(estimate), once + delta + passes + kv_again, round(written))


def _backward_once(p: Problem) -> int:
    """Compulsory bytes, and O and LSE, which recomputation reads."""
    t = tensors(p)
    return compulsory_bytes(p, "backward") + t.q_heads * seeing_queries(p) * (t.o_row + LSE_BYTES)


def backward_kv_outer(problem: Problem, cache: Cache, schedule: Schedule) -> Traffic:
    """Backward by recomputation: a block holds its keys with dK and dV and runs over the queries of the heads that share them.

    A first kernel reads O and dO, writes delta (fp32) and sets the sums of dQ to zero; Q, dO, LSE and delta stream past the blocks, which
    add to the sums; a third kernel converts them. What of that goes through HBM a replay of the three says (model/l2.py), and on a
    device that is not described, waves of blocks in step. With `two_pass_backward` dQ is computed by a pass of its own with the
    queries held. (FlashAttention-2, algorithm 2; its public code has these three kernels.)
    """
    p, t = problem, tensors(problem)
    row, statistics = t.q_row + t.o_row + 2 * LSE_BYTES, t.rows * LSE_BYTES
    sums_row = _sums_row(p, schedule)
    first = seeing_queries(p)
    ranges = query_blocks(p.mask, p.seq_q, p.seq_kv, schedule.block_kv)
    by_block = lengths(ranges)
    once = _backward_once(p)
    for_delta = t.q_heads * first * t.o_row + 2 * statistics  # dO once more; delta written and read
    # Sums of dQ's own dtype end as dQ, and their last write is counted already.
    ends = t.rows * sums_row * (2 if schedule.accumulator_bytes != p.element_bytes else 0)
    most = for_delta + t.q_heads * (by_block - first) * row + ends + t.q_heads * by_block * 2 * sums_row
    written = t.q + t.k + t.v
    if cache.l2_bytes and cache.sm_count:
        again, spilled = _backward_replayed(p, cache, schedule)
    else:
        waves = t.q_heads * (streamed(ranges, 1, cache.places(schedule.backward_blocks_per_sm)) - first)
        spilled = (
            (statistics + (ends + t.q_heads * first * 2 * sums_row) / 2 + waves * sums_row) if sums_row else statistics
        )
        again = for_delta - statistics + waves * row + spilled - statistics
    moved = min(most, again + spilled)
    share = moved / (again + spilled) if again + spilled else 0.0
    dq, dq_high = _dq_pass(p, cache, schedule) if schedule.two_pass_backward else (0.0, 0)
    copies = len(schedule.backward_copies) * t.o  # written, and read by the first kernel in place of the original
    copied = copies * cache.handed_over(t.o)
    estimate = once + moved + dq + 2 * copied
    return Traffic(once, round(estimate), once + most + dq_high + 2 * copies, round(written + spilled * share + copied))


def _sums_row(p: Problem, schedule: Schedule) -> int:
    """Bytes of a row of what is accumulated in memory."""
    return 0 if schedule.two_pass_backward else p.head_dim * schedule.accumulator_bytes


@functools.lru_cache(maxsize=1024)
def _backward_replayed(p: Problem, cache: Cache, schedule: Schedule) -> tuple[float, float]:
    """Bytes read again, and bytes of delta and sums written, by the three kernels of a backward pass one after the other."""
    t = tensors(p)
    ranges = query_blocks(p.mask, p.seq_q, p.seq_kv, schedule.block_kv)
    sums_row = _sums_row(p, schedule)
    assert cache.l2_bytes
    assert cache.sm_count
    slots = cache.sm_count * schedule.backward_blocks_per_sm
    l2_bytes, sm_count, sections = cache.l2_bytes, cache.sm_count, None
    if schedule.longest_first and p.mask != "none":  # the first keys are those that most queries see
        streamed_bytes = t.group * p.seq_q * (t.q_row + t.o_row + sums_row)
        sections = section_count(t.kv_heads, streamed_bytes, l2_bytes)
    streams = [Stream(t.q_row + LSE_BYTES), Stream(t.o_row), Stream(LSE_BYTES)]
    streams += [Stream(sums_row, adds=True)] if sums_row else []
    own = schedule.block_kv * (t.k_row + t.v_row)

    def replayed(kv_heads: int, sections: int | None) -> tuple[float, float]:
        l2 = L2(l2_bytes, cache.l2_partitions)
        chunk = chunk_rows(p.seq_q, streams, l2.capacity)
        chunks = [(head, at) for head in range(kv_heads * t.group) for at in range(-(-p.seq_q // chunk))]
        for head, at in chunks:
            l2.load(at, stream_key(1, head, at), chunk * t.o_row)
            l2.pass_by(at, chunk * t.o_row)
            l2.store(stream_key(2, head, at), chunk * LSE_BYTES)
            if sums_row:
                l2.store(stream_key(3, head, at), chunk * sums_row)
        last = t.group - 1
        blocks = [
            Block(kv_head * t.group + member, *ranges[number], own * (member == 0), own * (member == last))
            for kv_head, number in dealt(kv_heads, len(ranges), sections, 1)
            for member in range(t.group)
        ]
        replay(l2, blocks, streams, slots, sm_count, chunk)
        if sums_row and schedule.accumulator_bytes != p.element_bytes:
            for head, at in chunks:
                l2.load(stream_key(3, head, at), stream_key(3, head, at), chunk * sums_row)
                l2.pass_by(at, chunk * t.q_row)
        return l2.again, l2.spilled

    enough = max(1, heads_to_replay(t.q_heads, len(ranges), slots) // t.group)
    return of_all_heads(replayed, t.kv_heads, enough, 1, sections)


def _dq_pass(p: Problem, cache: Cache, schedule: Schedule) -> tuple[float, int]:
    """A pass of its own for dQ: Q, dO, LSE and delta once more, K and V streamed past blocks of queries: (estimate, high)."""
    t = tensors(p)
    held = t.q_heads * seeing_queries(p) * (t.q_row + t.o_row + 2 * LSE_BYTES)
    first_read = held + t.kv_heads * seen_keys(p) * (t.k_row + t.v_row)
    own = schedule.block_q * (2 * t.q_row + t.o_row)
    again, most = _keys_again(p, cache, schedule, schedule.dq_blocks_per_sm, own)
    return first_read * cache.handed_over(t.q + t.k + t.v + t.o) + again, first_read + most


def decode(problem: Problem, cache: Cache, schedule: Schedule) -> Traffic:
    """Few queries against a long cache: all of K and V that they see, once, by splits that each write an fp32 part of O.

    As many splits as fill the device, each of at least one key block; their parts are written and read again. Paged: the page
    table too. `high`: the query heads of a group do not share what they read, and a page is read whole.
    """
    p, t = problem, tensors(problem)
    once = compulsory_bytes(p, "forward")
    keys = seen_keys(p)
    splits = min(-(-keys // schedule.block_kv), -(-(cache.places(schedule.blocks_per_sm) or 1) // t.kv_heads))
    parts = 2 * splits * t.rows * (p.head_dim_v * 4 + LSE_BYTES) if splits > 1 else 0
    page = p.page_size or 1
    whole = -(-p.seq_kv // page) * page - (p.seq_kv - keys) // page * page
    kv_high = t.q_heads * whole * (t.k_row + t.v_row) - t.kv_heads * keys * (t.k_row + t.v_row)
    tables = (t.kv_heads - 1) * t.side
    parts_through_hbm = parts * cache.handed_over(parts / 2)
    high = once + parts + kv_high + tables
    return Traffic(once, round(once + parts_through_hbm), high, round(t.o + parts_through_hbm / 2))
