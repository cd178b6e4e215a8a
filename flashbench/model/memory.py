"""Predicted memory of a call, so that a case which cannot fit is not run; and the size of a KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from flashbench.model.schedule import Schedule
from flashbench.model.tensors import LSE_BYTES, tensors
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

    Plain attention holds two matrices of scores at a time (S and P; in backward dP and dS beside the saved P), and its output.
    A copy of Q that carries the scale would come on top, and is small beside the scores. Tiled: the output and row statistics,
    and in backward the gradients, delta and the fp32 accumulator of dQ. Memory O(N²) against O(N).
    """
    p, s = problem, schedule or Schedule()
    t = tensors(p, s)
    backward = p.mode in ("backward", "forward_backward")
    inputs = inputs_bytes(p)
    gradients = t.q + t.k + t.v
    copies = t.group * (t.k + t.v) if s.expands_kv and t.group > 1 else 0
    statistics = t.rows * LSE_BYTES
    if algorithm == "gemm-qk":
        return Footprint(t.q + t.k, 0, t.scores)
    if algorithm == "gemm-pv":
        return Footprint(t.scores + t.v, 0, t.o)
    if algorithm == "materialised":
        mask = p.seq_q * p.seq_kv if "mask_fill" in s.passes and p.mask != "none" else 0
        forward_peak = 2 * t.scores + t.o + copies + mask
        saved = t.scores + t.o + copies + mask  # P, and O
        backward_peak = max(2 * t.scores + t.v, t.scores + gradients) + copies
    else:
        kept_rows = statistics if s.writes_lse else 0
        if algorithm == "tiled-v1":
            size = s.accumulator_bytes
            kept_rows = 2 * statistics + (t.rows * p.head_dim_v * size if size != p.element_bytes else 0)
        forward_peak = saved = t.o + kept_rows + copies
        in_place = s.two_pass_backward or s.accumulator_bytes == p.element_bytes
        accumulator = 0 if in_place else t.rows * p.head_dim * s.accumulator_bytes
        backward_peak = gradients + statistics + accumulator + copies
    if not backward:
        return Footprint(inputs, 0, forward_peak)
    if p.mode == "backward":
        return Footprint(inputs, saved, backward_peak)
    return Footprint(inputs, 0, max(forward_peak, saved + backward_peak))


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
