"""Each kernel of FlashAttention-2's backward pass as a launch: its grid, arguments and constants for given tensors and blocks."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from flashbench.kernels.blocks import BlockShape, padded
from flashbench.kernels.flash_v2_backward import flash_v2_keys_kernel, flash_v2_queries_kernel
from flashbench.kernels.flash_v2_delta import ROW_PADDING, flash_v2_delta_kernel, rows_per_program
from flashbench.kernels.inputs import DeviceLimits
from flashbench.kernels.schedule import section_count
from flashbench.kernels.tiles import describable, describe

LOG2_E = math.log2(math.e)


class KernelLaunch(NamedTuple):
    """One launch, ready to make: `kernel[grid](*arguments, **constants)`."""

    kernel: Any
    grid: tuple[int]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


class Streams(NamedTuple):
    """What both kernels read, and how."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    d_out: torch.Tensor
    lse_bits: torch.Tensor
    delta: torch.Tensor
    causal: bool
    window: int | None
    scale: float
    precision: str
    limits: DeviceLimits

    def sources(self, blocks: BlockShape) -> tuple[Any, ...]:
        """q, k, v and d_out as the kernels take them."""
        q, k, v, d_out = self[:4]
        if not blocks.descriptors:
            return q, k, v, d_out
        d, dv = padded(q.shape[3]), padded(v.shape[3])
        return (
            describe(q, blocks.block_q, d), describe(k, blocks.block_kv, d),
            describe(v, blocks.block_kv, dv), describe(d_out, blocks.block_q, dv),
        )  # fmt: skip

    def numbers(self, heads: int, sections: int) -> tuple[Any, ...]:
        """Strides and scalars, for programs that are dealt out over batch x `heads` in so many sections."""
        q, k, v, d_out = self[:4]
        return (
            q.stride(), k.stride(), v.stride(), d_out.stride(), q.shape[0] * heads, heads, q.shape[1] // k.shape[1],
            q.shape[2], k.shape[2], self.window or 0, self.scale, self.scale * LOG2_E, sections,
        )  # fmt: skip

    def constants(self, blocks: BlockShape, tail: bool) -> dict[str, Any]:
        head_dim, head_dim_v = self.q.shape[3], self.v.shape[3]
        return {
            "HEAD_DIM": head_dim,
            "HEAD_DIM_V": head_dim_v,
            "D": padded(head_dim),
            "DV": padded(head_dim_v),
            "BLOCK_Q": blocks.block_q,
            "BLOCK_KV": blocks.block_kv,
            "CAUSAL": self.causal,
            "WINDOW": self.window is not None,
            "TAIL": tail,
            "PRECISION": self.precision,
            "DESCRIPTORS": blocks.descriptors,
            "num_warps": blocks.num_warps,
            "num_stages": blocks.num_stages,
            "enable_fp_fusion": True,  # s * c - lse in one instruction; Triton 3.10 no longer does so unasked
        }


def statistics_launch(out: torch.Tensor, d_out: torch.Tensor, lse: torch.Tensor) -> KernelLaunch:
    batch, heads, seq_q, head_dim_v = out.shape
    padded_q = triton.cdiv(seq_q, ROW_PADDING) * ROW_PADDING
    lse_bits, delta = (torch.empty(batch * heads, padded_q, dtype=torch.float32, device=out.device) for _ in range(2))
    rows = rows_per_program(padded(head_dim_v))
    arguments = (out, d_out, lse.contiguous(), lse_bits, delta, out.stride(), d_out.stride(), heads, seq_q)
    constants = {"HEAD_DIM_V": head_dim_v, "DV": padded(head_dim_v), "ROWS": rows, "num_warps": 4}
    return KernelLaunch(flash_v2_delta_kernel, (batch * heads * padded_q // rows,), arguments, constants)


def keys_launch(
    streams: Streams, dk: torch.Tensor, dv: torch.Tensor, sums: torch.Tensor | None, blocks: BlockShape
) -> KernelLaunch:
    q, (batch, heads, seq_kv, _) = streams.q, streams.k.shape
    statistics: tuple[Any, ...] = streams[4:6]
    if blocks.descriptors:
        statistics = tuple(
            TensorDescriptor(x, list(x.shape), list(x.stride()), [1, blocks.block_q]) for x in statistics
        )
    # What the programs of one head go over: Q and dO of its group and, in one pass, the sums of dQ.
    row_bytes = (q.shape[3] + streams.v.shape[3]) * q.element_size() + (0 if sums is None else 4 * q.shape[3])
    sections = section_count(batch * heads, q.shape[1] // heads * q.shape[2] * row_bytes, streams.limits.l2_bytes)
    # Triton's interpreter knows no reduction through a descriptor.
    bulk = sums is not None and blocks.descriptors and streams.limits.capability is not None and describable(sums)
    target = describe(sums, blocks.block_q, padded(q.shape[3])) if bulk and sums is not None else sums
    tail = q.shape[2] % blocks.block_q != 0 or (not streams.causal and seq_kv % blocks.block_kv != 0)
    arguments = (*streams.sources(blocks), *statistics, dk, dv, target, *streams.numbers(heads, sections))
    constants = streams.constants(blocks, tail) | {"WITH_DQ": sums is not None, "BULK_ADD": bulk}
    return KernelLaunch(
        flash_v2_keys_kernel, (batch * heads * triton.cdiv(seq_kv, blocks.block_kv),), arguments, constants
    )


def queries_launch(streams: Streams, dq: torch.Tensor, blocks: BlockShape) -> KernelLaunch:
    k, (batch, heads, seq_q, _) = streams.k, streams.q.shape
    kv_head_bytes = k.shape[2] * (k.shape[3] + streams.v.shape[3]) * k.element_size()
    sections = section_count(batch * k.shape[1], kv_head_bytes, streams.limits.l2_bytes)
    tail = not streams.causal and k.shape[2] % blocks.block_kv != 0
    arguments = (*streams.sources(blocks), *streams[4:6], dq, *streams.numbers(heads, sections))
    return KernelLaunch(
        flash_v2_queries_kernel,
        (batch * heads * triton.cdiv(seq_q, blocks.block_q),),
        arguments,
        streams.constants(blocks, tail),
    )
