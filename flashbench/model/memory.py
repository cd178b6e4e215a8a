"""Predicted memory of a call, so that a case which cannot fit is not run; and the size of a KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from flashbench.model.masks import visible_tiles
from flashbench.model.materialised import scaled_bytes
from flashbench.model.schedule import Schedule
from flashbench.model.tensors import LSE_BYTES, tensors, transposed_bytes
from flashbench.records import Device, Problem


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on the device around one call."""

    inputs: int
    """Q, K, V and, for backward, dO; whole pages and the page table of a paged cache."""
    kept: int
    """Live before the call besides the inputs: what the forward pass left for a backward call."""
    peak: int
    """Highest during the call, net of both: outputs and temporaries."""

    @property
    def total(self) -> int:
        return self.inputs + self.kept + self.peak


def footprint(algorithm: str, problem: Problem, schedule: Schedule | None = None) -> Footprint:
    """Memory of `problem` under `algorithm` (a name of `traffic.ALGORITHMS`).

    Plain attention holds matrices of scores: O(N²). Tiled: the output and row statistics, and in backward the gradients, delta and
    the fp32 accumulator of dQ: O(N), unless its blocks are tensors that autograd keeps (`stored_blocks`).
    """
    p, s = problem, schedule or Schedule()
    t = tensors(p, s)
    if algorithm == "gemm-qk":
        return Footprint(t.q + t.k, 0, t.scores)
    if algorithm == "gemm-pv":
        return Footprint(t.scores + t.v, 0, t.o)
    if algorithm == "materialised":
        phases = _materialised(p, s)
    elif s.stored_blocks:
        phases = _stored_blocks(p, s)
    else:
        phases = _tiled(algorithm, p, s)
    inputs = inputs_bytes(p)
    if p.mode == "backward":
        return Footprint(inputs, phases.standing + phases.saved, phases.backward)
    if p.mode == "forward_backward":
        return Footprint(inputs, phases.standing, max(phases.forward, phases.saved + phases.beyond_saved))
    return Footprint(inputs, phases.standing, phases.forward)


@dataclass(frozen=True, slots=True)
class _Phases:
    """Bytes beyond the inputs."""

    forward: int
    """Highest during the forward pass, its output included."""
    saved: int
    """What a forward pass leaves: its output, and what its backward pass reads."""
    backward: int
    """Highest during the backward pass beyond what was saved."""
    freed: int | None = None
    """The same when saved matrices are given back as soon as they are used, as after a forward pass in the same call."""
    standing: int = 0
    """What the provider holds between calls: its mask."""

    @property
    def beyond_saved(self) -> int:
        return self.backward if self.freed is None else self.freed


def _materialised(p: Problem, s: Schedule) -> _Phases:
    """Forward S and P at a time; S goes when P is there, unless a mask was filled in through a view of it, which lives on.

    Backward, beside P: dV, dP and dS, and the product of dP and P where one is stored; then, in a fill through a view, the gradient in
    four places (`schedule.PASSES`); at the end dS, dQ and dK.
    """
    t = tensors(p, s)
    masked = p.mask != "none"
    viewed = masked and "view_copies" in s.passes
    repeated = t.group * (t.k + t.v) if s.expands_kv and t.group > 1 else 0
    copies = repeated + sum(scaled_bytes(p, s))
    forward = copies + t.scores + max(t.scores, t.scores * viewed + t.o)
    softmax = (2 + ("grad_product" in s.passes)) * t.scores + t.v
    products = t.scores + t.q + t.k + t.v
    fill = 4 * t.scores * viewed + t.v
    return _Phases(
        forward=forward,
        saved=t.scores + t.o + copies,
        backward=max(softmax, fill, products) + repeated,
        freed=max(softmax, max(fill, products) - t.scores) + repeated,  # P is read for the last time by the softmax
        standing=p.seq_q * p.seq_kv * (masked and "mask_fill" in s.passes),
    )


def _tiled(algorithm: str, p: Problem, s: Schedule) -> _Phases:
    t = tensors(p, s)
    statistics = t.rows * LSE_BYTES
    copies = (t.group * (t.k + t.v) if s.expands_kv and t.group > 1 else 0) + transposed_bytes(p, s)
    kept_rows = statistics if s.writes_lse else 0
    if algorithm == "tiled-v1":
        size = s.accumulator_bytes
        kept_rows = 2 * statistics + (t.rows * p.head_dim_v * size if size != p.element_bytes else 0)
    left = t.o + kept_rows + copies
    in_place = s.two_pass_backward or s.accumulator_bytes == p.element_bytes
    accumulator = 0 if in_place else t.rows * p.head_dim * s.accumulator_bytes
    laid_out_anew = len(s.backward_copies) * t.o
    return _Phases(left, left, t.q + t.k + t.v + statistics + accumulator + copies + laid_out_anew)


def _stored_blocks(p: Problem, s: Schedule) -> _Phases:
    """A loop of library calls over blocks, in fp32: Q with the scale, the blocks of O, and of a block of scores the new and the old
    weights, the scores and the scores less their maximum; at the end the blocks of O and O itself.

    Autograd keeps of each visible block its scores and weights (and these once more in the inputs' dtype), and what O was before
    it. Backward: the gradients, one of them a second time (a slice's gradient is as large as what it was cut from), three blocks.
    """
    t = tensors(p, s)
    total = max(4, p.element_bytes)
    rows, keys = min(s.block_q, p.seq_q), min(s.block_kv, p.seq_kv)
    block = t.q_heads * rows * keys * total
    o_block = t.q_heads * rows * p.head_dim_v * total
    tiles = visible_tiles(p.mask, p.seq_q, p.seq_kv, s.block_q, s.block_kv)
    weights = t.q_heads * rows * keys * p.element_bytes * (p.element_bytes != total)
    forward = t.q + t.o + max((4 if p.seq_kv > keys else 3) * block, t.o)
    backward = t.q + t.k + t.v + max(t.q, t.k, t.v) + 3 * block
    standing = p.seq_q * p.seq_kv * (p.mask != "none")
    return _Phases(forward, t.q + t.o + tiles * (2 * block + weights + o_block), backward, standing=standing)


def inputs_bytes(problem: Problem) -> int:
    """Bytes of what a call is given; K and V of a paged cache in whole pages."""
    p, t = problem, tensors(problem)
    page = p.page_size or 1
    slots = p.batch * p.heads_kv * -(-p.seq_kv // page) * page
    d_o = t.o if p.mode in ("backward", "forward_backward") else 0
    return t.q + slots * (t.k_row + t.v_row) + d_o + t.side


def kv_cache_bytes(problem: Problem, layers: int = 1) -> int:
    """Bytes of the keys and values of `layers` layers, without padding to pages."""
    t = tensors(problem)
    return layers * (t.k + t.v)


def oom_reason(predicted: Footprint, device: Device) -> str | None:
    """Why a call cannot fit the device's memory, in words; None when it may fit (or the device's memory is not known)."""
    if device.memory_bytes <= 0 or predicted.total <= device.memory_bytes:
        return None
    needed, there = predicted.total / 2**30, device.memory_bytes / 2**30
    return f"predicted: needs {needed:.1f} GiB ({predicted.peak / 2**30:.1f} GiB of it during the call), {device.name} has {there:.1f} GiB"
