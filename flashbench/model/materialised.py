"""HBM bytes of plain attention, which stores S and P: pass by pass, as its kernels run. Also of its two products alone."""

from __future__ import annotations

from flashbench.model.interval import Cache, Traffic
from flashbench.model.schedule import Schedule
from flashbench.model.tensors import Tensors, compulsory_bytes, tensors
from flashbench.records import Problem


def materialised(problem: Problem, cache: Cache, schedule: Schedule) -> Traffic:
    """Four passes over the scores forward (write S; read S, write P; read P), seven backward, and those of `schedule.passes`.

    The mask saves nothing: every score is computed, stored and read. S and P stay in the L2 when they fit.
    """
    p, t = problem, tensors(problem, schedule)
    forward, backward = p.mode != "backward", p.mode in ("backward", "forward_backward")
    passes = forward * forward_passes(p, schedule) + backward * backward_passes(p, schedule)
    # One mask serves all heads, and each of them reads it: again, unless it outlives a head's scores in the L2.
    uses = (forward + backward) if "mask_fill" in schedule.passes else forward
    mask = _mask_bytes(p, schedule)
    mask_again = uses * (t.q_heads - 1) * mask
    mask_reread = cache.again(mask_again, mask + 2 * t.scores / t.q_heads)
    once = t.side + uses * mask
    once += forward * (t.q + t.k + t.v + t.o)  # read Q, K, V; write O
    once += backward * (2 * (t.q + t.k + t.v) + 2 * t.o)  # read Q, K, V, and dO twice; write dQ, dK, dV
    copies = t.group * (t.k + t.v) if schedule.expands_kv and t.group > 1 else 0
    copied = 2 * copies * (forward + backward)  # written and read; backward likewise their gradients
    through_hbm, copies_through_hbm = cache.handed_over(t.scores), cache.handed_over(copies / 2)
    estimate = once + mask_reread + passes * t.scores * through_hbm + copied * copies_through_hbm
    high = once + mask_again + passes * t.scores + copied + _tile_rereads(p, t, schedule)
    written = forward * t.o + backward * (t.q + t.k + t.v) + copied / 2 * copies_through_hbm
    # Forward writes S and P, backward dP and dS; a pass of its own writes what it reads, dropout's mask in forward alone.
    dropout = ("dropout" in schedule.passes) / _score_bytes(p, schedule) / 2
    writes = forward * (forward_passes(p, schedule) / 2 + dropout)
    writes += backward * (2 + (backward_passes(p, schedule) - 7) / 2 - dropout)
    written += writes * t.scores * through_hbm
    return Traffic(compulsory_bytes(p), round(estimate), round(high), round(written))


def forward_passes(problem: Problem, schedule: Schedule) -> float:
    """Passes over a matrix of scores: 4, and 2 for each pass of its own. Dropout: also a mask of one byte, half a pass of bf16."""
    extra = 0.0
    for name in schedule.passes:
        if name == "dropout":
            extra += 2 + 1 / _score_bytes(problem, schedule)
        elif name == "scale" or problem.mask != "none":
            extra += 2
    return 4 + extra


def backward_passes(problem: Problem, schedule: Schedule) -> float:
    """Read P for dV; write dP; read P and dP, write dS; read dS for dQ and again for dK: 7. An added mask has no backward pass."""
    extra = 0.0
    for name in schedule.passes:
        if name == "dropout":
            extra += 2 + 1 / _score_bytes(problem, schedule)
        elif name == "scale" or (name == "mask_fill" and problem.mask != "none"):
            extra += 2
    return 7 + extra


def _score_bytes(problem: Problem, schedule: Schedule) -> int:
    return tensors(problem, schedule).scores // (problem.batch * problem.heads_q * problem.seq_q * problem.seq_kv)


def _mask_bytes(p: Problem, schedule: Schedule) -> int:
    """The mask as a tensor, one for all heads: truth values to fill by, or numbers to add."""
    if p.mask == "none":
        return 0
    element = 1 if "mask_fill" in schedule.passes else p.element_bytes if "mask_add" in schedule.passes else 0
    return p.seq_q * p.seq_kv * element


def _tile_rereads(p: Problem, t: Tensors, schedule: Schedule) -> int:
    """What the products read again when no block of theirs finds in the L2 what another has read."""
    rows, columns = -(-p.seq_q // schedule.block_q), -(-p.seq_kv // schedule.block_kv)
    kv = rows * t.group * (t.k + t.v) - (t.k + t.v)
    forward = (columns - 1) * t.q + kv
    backward = (columns - 1) * (t.q + 2 * t.o) + kv
    return {"backward": backward, "forward_backward": forward + backward}.get(p.mode, forward)


def gemm_qk(problem: Problem, _cache: Cache, schedule: Schedule) -> Traffic:
    """QKᵀ alone: read Q and K, write S."""
    p, t = problem, tensors(problem, schedule)
    once = t.q + t.k + t.scores
    rows, columns = -(-p.seq_q // schedule.block_q), -(-p.seq_kv // schedule.block_kv)
    return Traffic(once, once, t.scores + columns * t.q + rows * t.group * t.k, t.scores)


def gemm_pv(problem: Problem, _cache: Cache, schedule: Schedule) -> Traffic:
    """PV alone: read P and V, write O. One block holds a whole row of O, so P is read once."""
    p, t = problem, tensors(problem, schedule)
    once = t.scores + t.v + t.o
    return Traffic(once, once, t.scores + -(-p.seq_q // schedule.block_q) * t.group * t.v + t.o, t.o)
