"""Floating-point operations of a problem.

*Useful* FLOPs are those of the visible pairs, the same for every provider, so that speeds compare. *Executed* FLOPs are what
a tiled kernel really multiplies: whole tiles, padded head dimensions. A product of two matrices is 2 FLOP per multiply-add.
"""

from __future__ import annotations

from flashbench.model.masks import visible_pairs, visible_tiles
from flashbench.model.schedule import Schedule
from flashbench.records import Problem

PRODUCTS = {"gemm-qk": "scores", "gemm-pv": "values"}
"""Algorithms that are one of the two matrix products alone, and what they compute: S = QKᵀ, unscaled, or O = PV of a given P."""

SOFTMAX_OPS = 5
"""Per visible pair: scale, maximum, subtract, exponential, sum (and one division a row, neglected)."""


def pairs(problem: Problem) -> int:
    """Visible pairs over batch and query heads. Grouped heads share keys, not work: a query head counts in full."""
    p = problem
    return p.batch * p.heads_q * visible_pairs(p.mask, p.seq_q, p.seq_kv)


def forward_flops(problem: Problem) -> int:
    """QKᵀ and PV: 2 · pairs · (d + d_v); 4N²d a head when dense and d = d_v."""
    return 2 * pairs(problem) * (problem.head_dim + problem.head_dim_v)


def backward_flops(problem: Problem, recomputed: bool = True) -> int:
    """The products of backward: dV, dP, dQ, dK, and S once more when it was not stored.

    Recomputed 2 · pairs · (3d + 2d_v), the convention for every provider (2.5 times forward when d = d_v: FlashAttention-2,
    section 4.1); stored 2 · pairs · (2d + 2d_v).
    """
    return 2 * pairs(problem) * ((3 if recomputed else 2) * problem.head_dim + 2 * problem.head_dim_v)


def useful_flops(problem: Problem, algorithm: str | None = None) -> int:
    """Useful FLOPs of a problem in its mode. `gemm-qk` and `gemm-pv` are one dense product alone: 2 · B · H · Nq · Nk · d."""
    p = problem
    if algorithm in PRODUCTS:
        return 2 * p.batch * p.heads_q * p.seq_q * p.seq_kv * (p.head_dim if algorithm == "gemm-qk" else p.head_dim_v)
    if p.mode == "backward":
        return backward_flops(p)
    if p.mode == "forward_backward":
        return forward_flops(p) + backward_flops(p)
    return forward_flops(p)


def softmax_ops(problem: Problem) -> int:
    """Operations of the softmax, of the forward pass: 5 per visible pair. Reported beside the useful FLOPs, not in them."""
    return SOFTMAX_OPS * pairs(problem)


def exponentials(problem: Problem, algorithm: str | None = None) -> int:
    """Exponentials that the problem needs: one per visible pair and pass (backward computes P again); none of a product alone."""
    if algorithm in PRODUCTS:
        return 0
    return pairs(problem) * (2 if problem.mode == "forward_backward" else 1)


def executed_flops(
    problem: Problem,
    schedule: Schedule,
    padded_head_dim: int | None = None,
    padded_head_dim_v: int | None = None,
) -> int:
    """FLOPs of the tiles that a tiled kernel computes: every tile with a visible pair, whole.

    A two-pass backward computes S and dP twice: 2 · (4d + 3d_v) a pair in place of 2 · (3d + 2d_v).
    """
    p, s = problem, schedule
    d, d_v = padded_head_dim or p.head_dim, padded_head_dim_v or p.head_dim_v
    forward = 2 * (d + d_v)
    backward = 2 * (4 * d + 3 * d_v) if s.two_pass_backward else 2 * (3 * d + 2 * d_v)
    per_pair = {"backward": backward, "forward_backward": forward + backward}.get(p.mode, forward)
    tiles = visible_tiles(p.mask, p.seq_q, p.seq_kv, s.block_q, s.block_kv)
    return p.batch * p.heads_q * tiles * s.block_q * s.block_kv * per_pair
