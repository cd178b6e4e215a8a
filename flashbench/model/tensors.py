"""Bytes of the tensors of a problem, and what of them the mask lets anyone see."""

from __future__ import annotations

from dataclasses import dataclass

from flashbench.model.masks import visible_range
from flashbench.model.schedule import Schedule
from flashbench.records import Problem

LSE_BYTES = 4
"""Row statistics are fp32: the log-sum-exp, and in backward delta = rowsum(dO * O)."""
SCALE_BYTES = 4
PAGE_INDEX_BYTES = 4
"""Page tables hold int32."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """Sizes of one problem. Per-row figures are bytes of one row of one head; the rest are bytes over batch and heads."""

    q_heads: int
    """Batch x query heads."""
    kv_heads: int
    """Batch x key/value heads."""
    group: int
    """Query heads that share a key/value head."""
    q_row: int
    k_row: int
    v_row: int
    o_row: int
    q: int
    k: int
    v: int
    o: int
    rows: int
    """Queries over batch and heads; an LSE is `rows * 4` bytes."""
    scores: int
    """One seq_q x seq_kv matrix over batch and query heads."""
    side: int
    """What else must be read: a page table and the length of each sequence; fp8 scales of q, k and v per key/value head."""


def output_element_bytes(problem: Problem) -> int:
    """Bytes of an element of O: as the inputs, but 2 (bf16) for fp8, whose output would lose its digits."""
    return max(2, problem.element_bytes)


def tensors(problem: Problem, schedule: Schedule | None = None) -> Tensors:
    """Sizes of `problem` as `schedule` stores its scores."""
    p, size = problem, problem.element_bytes
    out = output_element_bytes(p)
    q_heads, kv_heads = p.batch * p.heads_q, p.batch * p.heads_kv
    score_bytes = (schedule.score_bytes if schedule else None) or out
    side = 3 * kv_heads * SCALE_BYTES if p.dtype == "fp8" else 0
    if p.page_size is not None:
        side += p.batch * (-(-p.seq_kv // p.page_size) + 1) * PAGE_INDEX_BYTES
    return Tensors(
        q_heads=q_heads,
        kv_heads=kv_heads,
        group=p.heads_q // p.heads_kv,
        q_row=p.head_dim * size,
        k_row=p.head_dim * size,
        v_row=p.head_dim_v * size,
        o_row=p.head_dim_v * out,
        q=q_heads * p.seq_q * p.head_dim * size,
        k=kv_heads * p.seq_kv * p.head_dim * size,
        v=kv_heads * p.seq_kv * p.head_dim_v * size,
        o=q_heads * p.seq_q * p.head_dim_v * out,
        rows=q_heads * p.seq_q,
        scores=q_heads * p.seq_q * p.seq_kv * score_bytes,
        side=side,
    )


def transposed_bytes(problem: Problem, schedule: Schedule) -> int:
    """Bytes of the V that an fp8 problem is given a second time, along its keys; 0 where `schedule` does not."""
    return tensors(problem).v if schedule.transposes_v and problem.dtype == "fp8" else 0


def seen_keys(problem: Problem) -> int:
    """Keys that some query sees: all but those before the first query's window."""
    p = problem
    return p.seq_kv - visible_range(p.mask, p.seq_q, p.seq_kv, 0)[0]


def seeing_queries(problem: Problem) -> int:
    """Queries that see some key; bottom-right aligned, the first seq_q - seq_kv of a causal problem see none."""
    return problem.seq_q if problem.mask == "none" else min(problem.seq_q, problem.seq_kv)


def compulsory_bytes(problem: Problem, mode: str | None = None) -> int:
    """Bytes that any implementation must move when its caches are empty: every input that matters once, every output once.
    Of the problem's own mode, or of `mode`.

    Forward reads Q, K, V and writes O; backward reads Q, K, V, dO and writes dQ, dK, dV. K and V count once per key/value head,
    whatever the number of query heads; a causal mask hides pairs, not keys, so square problems move as much with it as without.
    """
    t, p = tensors(problem), problem
    q = t.q_heads * seeing_queries(p) * t.q_row
    kv = t.kv_heads * seen_keys(p) * (t.k_row + t.v_row)
    d_o = t.q_heads * seeing_queries(p) * t.o_row
    forward = q + kv + t.o + t.side
    backward = q + kv + d_o + t.q + t.k + t.v + t.side
    return {"backward": backward, "forward_backward": forward + backward}.get(mode or p.mode, forward)
