"""HBM bytes of plain attention, which stores S and P: pass by pass, as its kernels run. Also of its two products alone."""

from __future__ import annotations

from flashbench.model.interval import Cache, Traffic
from flashbench.model.schedule import PASSES, Pass, Schedule
from flashbench.model.tensors import Tensors, compulsory_bytes, tensors
from flashbench.records import Problem


def materialised(problem: Problem, cache: Cache, schedule: Schedule) -> Traffic:
    """Four passes over the scores forward (write S; read S, write P; read P), seven backward, and those of `schedule.passes`.

    The mask saves nothing: every score is computed, stored and read. S and P stay in the L2 when they fit.
    """
    p, t = problem, tensors(problem, schedule)
    forward, backward = p.mode != "backward", p.mode in ("backward", "forward_backward")
    read_forward, written_forward = forward_passes(p, schedule)
    read_backward, written_backward = backward_passes(p, schedule)
    passes_read = forward * read_forward + backward * read_backward
    passes_written = forward * written_forward + backward * written_backward
    # One mask serves all heads, and each of them reads it: again, unless it outlives in the L2 the scores that a head reads and writes.
    uses = (forward + backward) if "mask_fill" in schedule.passes else forward
    mask = _mask_bytes(p, schedule)
    mask_again = uses * (t.q_heads - 1) * mask
    mask_reread = cache.again(mask_again, mask + 2 * t.scores / t.q_heads, shared=True)
    once = t.side + uses * mask
    once += forward * (t.q + t.k + t.v + t.o)  # read Q, K, V; write O
    once += backward * (2 * (t.q + t.k + t.v) + 2 * t.o)  # read Q, K, V, and dO twice; write dQ, dK, dV
    # Copies are written by one kernel and read by the next, forward; backward likewise the gradients of the copies.
    directions = forward + backward
    repeated = [t.group * t.k, t.group * t.v] if schedule.expands_kv and t.group > 1 else []
    copies = repeated + scaled_bytes(p, schedule)
    copied = directions * sum(copies)
    copied_through_hbm = directions * sum(size * cache.handed_over(size) for size in copies)
    scores_through_hbm = t.scores * cache.handed_over(t.scores)
    estimate = once + mask_reread + (passes_read + passes_written) * scores_through_hbm + 2 * copied_through_hbm
    high = once + mask_again + (passes_read + passes_written) * t.scores + 2 * copied + _tile_rereads(p, t, schedule)
    written = forward * t.o + backward * (t.q + t.k + t.v) + copied_through_hbm + passes_written * scores_through_hbm
    return Traffic(compulsory_bytes(p), round(estimate), round(high), round(written))


def forward_passes(problem: Problem, schedule: Schedule) -> tuple[float, float]:
    """Matrices of scores read and written: S and P each way, and passes of their own. Dropout writes its mask, a byte an element."""
    mask = ("dropout" in schedule.passes) / _score_bytes(problem, schedule)
    extra = [found.forward for found in _passes(problem, schedule)]
    return 2 + sum(read for read, _ in extra), 2 + sum(written for _, written in extra) + mask


def backward_passes(problem: Problem, schedule: Schedule) -> tuple[float, float]:
    """Read P for dV; write dP; read P and dP, write dS; read dS for dQ and again for dK: 5 and 2. Dropout reads its mask."""
    mask = ("dropout" in schedule.passes) / _score_bytes(problem, schedule)
    extra = [found.backward for found in _passes(problem, schedule)]
    return 5 + sum(read for read, _ in extra) + mask, 2 + sum(written for _, written in extra)


def _passes(problem: Problem, schedule: Schedule) -> list[Pass]:
    named = (PASSES[name] for name in schedule.passes)
    return [found for found in named if problem.mask != "none" or not found.masked]


def scaled_bytes(problem: Problem, schedule: Schedule) -> list[int]:
    """Sizes of the copies of Q and K that carry the scale."""
    t = tensors(problem, schedule)
    return [{"q": t.q, "k": t.k}[name] for name in schedule.scaled_copies]


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
