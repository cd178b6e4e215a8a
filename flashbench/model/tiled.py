"""HBM bytes of the tiled algorithms, in which no score reaches HBM, in both loop orders; and of decoding.

Sizes: d, d_v head dimensions, s bytes of an element. `R` below are rows counted over blocks, `R0` rows counted once.
"""

from __future__ import annotations

from flashbench.model.interval import Cache, Traffic, lengths, streamed
from flashbench.model.masks import key_blocks, query_blocks
from flashbench.model.schedule import Schedule
from flashbench.model.tensors import LSE_BYTES, compulsory_bytes, seeing_queries, seen_keys, tensors
from flashbench.records import Problem

STATISTICS_BYTES = 8
"""The first FlashAttention keeps m and l apart, fp32 each."""


def forward_q_outer(problem: Problem, cache: Cache, schedule: Schedule) -> Traffic:
    """FlashAttention-2 forward: a block holds its queries and runs over the keys; Q read once, O written once.

    K and V are read again by each *wave* of blocks, one on each SM, not by each block: those of a wave stream the same keys nearly
    in step. A later wave finds the share of one head's K and V that the L2 holds. (Dao 2023, algorithm 1.)
    """
    p, t = problem, tensors(problem)
    blocks = key_blocks(p.mask, p.seq_q, p.seq_kv, schedule.block_q)
    row = t.k_row + t.v_row
    first = seen_keys(p)
    lse = t.rows * LSE_BYTES * schedule.writes_lse
    by_wave = t.kv_heads * (streamed(blocks, t.group, cache.in_step) - first) * row
    by_block = t.kv_heads * (t.group * lengths(blocks) - first) * row
    once = compulsory_bytes(p, "forward")
    estimate = once + lse + cache.again(by_wave, p.seq_kv * row, shared=True)
    return Traffic(once, round(estimate), once + lse + by_block, t.o + lse)


def forward_kv_outer(problem: Problem, cache: Cache, schedule: Schedule) -> Traffic:
    """FlashAttention (v1) forward: one block per head holds a key block at a time and runs over the queries.

    K and V are read once; Q, O and the row statistics are read for every key block that sees them, and O and the statistics written
    back; the first pass finds nothing to read. What the heads that run together go over is their working set. (Dao et al. 2022,
    algorithm 1: Θ(N²d²/M) accesses.)
    """
    p, t = problem, tensors(problem)
    blocks = query_blocks(p.mask, p.seq_q, p.seq_kv, schedule.block_kv)
    again = lengths(blocks) - seeing_queries(p)  # R - R0
    kept_row = p.head_dim_v * schedule.accumulator_bytes + STATISTICS_BYTES
    passes = t.q_heads * again * (t.q_row + 2 * kept_row)
    waiting = min(t.q_heads, cache.slots or t.q_heads) * p.seq_q * (t.q_row + kept_row)
    once = compulsory_bytes(p, "forward")
    lse = t.rows * LSE_BYTES * schedule.writes_lse
    kv_again = (t.group - 1) * t.kv_heads * seen_keys(p) * (t.k_row + t.v_row)  # the heads of a group run together
    written = t.o + lse + cache.again(t.q_heads * again * kept_row, waiting)
    estimate = once + lse + cache.again(passes, waiting)
    return Traffic(once, round(estimate), once + lse + passes + kv_again, round(written))


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
    waiting = min(t.q_heads, cache.slots or t.q_heads) * p.seq_q * (row + dq_row)
    once = _backward_once(p)
    delta = t.rows * LSE_BYTES
    kv_again = 2 * (t.group - 1) * t.kv_heads * seen_keys(p) * (t.k_row + t.v_row)
    written = t.q + t.k + t.v + delta + cache.again(t.q_heads * again * dq_row, waiting)
    estimate = once + delta + cache.again(passes, waiting)
    return Traffic(once, round(estimate), once + delta + passes + kv_again, round(written))


def _backward_once(p: Problem) -> int:
    """Compulsory bytes, and O and LSE, which recomputation reads."""
    t = tensors(p)
    return compulsory_bytes(p, "backward") + t.q_heads * seeing_queries(p) * (t.o_row + LSE_BYTES)


def backward_kv_outer(problem: Problem, cache: Cache, schedule: Schedule) -> Traffic:
    """Backward by recomputation: a block holds its keys with dK and dV and runs over the queries of the heads that share them.

    A first kernel reads O and dO and writes delta (fp32). Q, dO, LSE and delta stream by waves. dQ is accumulated in memory: set
    to zero by one kernel, read and written by each wave of the next, converted by a third, so that all of it passes from kernel to
    kernel; or, with `two_pass_backward`, computed by a pass of its own with the queries held. (FlashAttention-2, algorithm 2; its
    public code has these three kernels.)
    """
    p, t = problem, tensors(problem)
    row, statistics = t.q_row + t.o_row + 2 * LSE_BYTES, t.rows * LSE_BYTES
    first = seeing_queries(p)
    blocks = query_blocks(p.mask, p.seq_q, p.seq_kv, schedule.block_kv)
    by_wave, by_block = streamed(blocks, 1, cache.in_step), lengths(blocks)
    once = _backward_once(p)
    for_delta = t.q_heads * first * t.o_row + 2 * statistics  # dO once more; delta written and read
    delta_through_hbm = cache.handed_over(2 * t.o)
    estimate = once + for_delta * delta_through_hbm
    estimate += cache.again(t.q_heads * (by_wave - first) * row, t.group * p.seq_q * row, shared=True)
    high = once + for_delta + t.q_heads * (by_block - first) * row
    written = t.q + t.k + t.v + statistics * delta_through_hbm
    if schedule.two_pass_backward:
        dq, dq_high = _dq_pass(p, cache, schedule)
    else:
        size = p.head_dim * schedule.accumulator_bytes
        # set to zero and converted; one of dQ's own dtype ends as dQ, and its last write is counted already
        ends = t.rows * size * (2 if schedule.accumulator_bytes != p.element_bytes else 0)
        between = ends + t.q_heads * first * 2 * size  # zeros read back, and sums written, once
        waves = t.q_heads * (by_wave - first) * 2 * size  # one head's sums, in one place of the L2, between its waves
        dq = between * cache.handed_over(t.rows * size) + cache.again(waves, p.seq_q * (size + row))
        dq_high = ends + t.q_heads * by_block * 2 * size
        written += dq / 2  # set to zero and accumulated: as much is read
    return Traffic(once, round(estimate + dq), high + dq_high, round(written))


def _dq_pass(p: Problem, cache: Cache, schedule: Schedule) -> tuple[float, int]:
    """A pass of its own for dQ: Q, dO, LSE and delta once more, K and V streamed by waves of query blocks: (estimate, high)."""
    t = tensors(p)
    blocks = key_blocks(p.mask, p.seq_q, p.seq_kv, schedule.block_q)
    kv_row = t.k_row + t.v_row
    held = t.q_heads * seeing_queries(p) * (t.q_row + t.o_row + 2 * LSE_BYTES)
    everything = t.q + t.k + t.v + t.o
    keys = seen_keys(p)
    by_wave = t.kv_heads * (streamed(blocks, t.group, cache.in_step) - keys) * kv_row
    by_block = t.q_heads * lengths(blocks) * kv_row
    first_read = held + t.kv_heads * keys * kv_row
    waves = cache.again(by_wave, p.seq_kv * kv_row, shared=True)
    return first_read * cache.handed_over(everything) + waves, held + by_block


def decode(problem: Problem, cache: Cache, schedule: Schedule) -> Traffic:
    """Few queries against a long cache: all of K and V that they see, once, by splits that each write an fp32 part of O.

    As many splits as fill the device, each of at least one key block; their parts are written and read again. Paged: the page
    table too. `high`: the query heads of a group do not share what they read, and a page is read whole.
    """
    p, t = problem, tensors(problem)
    once = compulsory_bytes(p, "forward")
    keys = seen_keys(p)
    splits = min(-(-keys // schedule.block_kv), -(-(cache.slots or 1) // t.kv_heads))
    parts = 2 * splits * t.rows * (p.head_dim_v * 4 + LSE_BYTES) if splits > 1 else 0
    page = p.page_size or 1
    whole = -(-p.seq_kv // page) * page - (p.seq_kv - keys) // page * page
    kv_high = t.q_heads * whole * (t.k_row + t.v_row) - t.kv_heads * keys * (t.k_row + t.v_row)
    tables = (t.kv_heads - 1) * t.side
    parts_through_hbm = cache.again(parts, parts)
    high = once + parts + kv_high + tables
    return Traffic(once, round(once + parts_through_hbm), high, round(t.o + parts_through_hbm / 2))
