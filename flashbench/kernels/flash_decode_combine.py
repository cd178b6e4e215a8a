"""The second step of decoding: what the splits of a row found, made one output by the weights that their sums of exponentials give them.

Split i leaves its own normalised output o_i and log-sum-exp L_i, a natural logarithm as everywhere outside a kernel's registers:

    L = log sum_i exp(L_i)        out = sum_i exp(L_i - L) o_i

A split that saw no key has L_i = -inf and weight 0. The parts are added in the order of the splits, so that the result is the same bits
each time. Cost: splits x rows x (d_v + 1) x 4 bytes, written by the first kernel and, at usual sizes, read here from the L2.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from flashbench.kernels.blocks import padded

LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))
LN_2: tl.constexpr = tl.constexpr(math.log(2))
TILE_ELEMENTS = 8192
"""Of the parts that a program holds at a time: 64 registers a thread at 4 warps."""


@triton.jit(do_not_specialize=("splits",))
def combine_kernel(
    parts, part_lse,  # contiguous (rows, splits, HEAD_DIM_V) and (rows, splits), fp32
    o, lse,  # contiguous (rows, HEAD_DIM_V) and (rows,); lse is None unless WITH_LSE
    splits,
    HEAD_DIM_V: tl.constexpr, DV: tl.constexpr, SPLITS: tl.constexpr, WITH_LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row: an online softmax over SPLITS parts at a time."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, DV)
    acc = tl.zeros([DV], tl.float32)
    total = 0.0
    top = float("-inf")  # in bits
    if PDL:
        gdc_wait()  # this kernel may have been started before the first one had ended
    for first in range(0, splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        there = split < splits
        bits = tl.load(part_lse + row * splits + split, mask=there, other=float("-inf")) * LOG2_E
        keep = there[:, None]
        if DV != HEAD_DIM_V:
            keep = keep & (column < HEAD_DIM_V)[None, :]
        part = tl.load(parts + (row * splits + split)[:, None] * HEAD_DIM_V + column[None, :], mask=keep, other=0.0)
        new_top = tl.maximum(top, tl.max(bits, 0))
        origin = tl.where(new_top == float("-inf"), 0.0, new_top)  # no key seen yet: -inf - -inf would be NaN
        alpha = tl.exp2(top - origin)
        weight = tl.exp2(bits - origin)
        acc = acc * alpha + tl.sum(part * weight[:, None], 0)
        total = total * alpha + tl.sum(weight, 0)
        top = new_top
    divisor = tl.where(total > 0.0, total, 1.0)
    tl.store(o + row * HEAD_DIM_V + column, (acc / divisor).to(o.dtype.element_ty), mask=column < HEAD_DIM_V)
    if WITH_LSE:
        tl.store(lse + row, (top + tl.log2(divisor)) * LN_2)


class Combination(NamedTuple):
    """One launch of `combine_kernel`."""

    grid: tuple[int]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


def combination(
    parts: torch.Tensor, part_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, pdl: bool
) -> Combination:
    """The launch that makes `out` (..., Dv), and `lse` (...) unless None, of `parts` (..., splits, Dv) and `part_lse` (..., splits).

    All contiguous; the parts and both log-sum-exps fp32. `pdl`: as a programmatic dependent of the kernel that writes the parts.
    """
    splits, head_dim_v = parts.shape[-2:]
    constants = {
        "HEAD_DIM_V": head_dim_v,
        "DV": padded(head_dim_v),
        "SPLITS": min(1 << (splits - 1).bit_length(), TILE_ELEMENTS // padded(head_dim_v)),
        "WITH_LSE": lse is not None,
        "PDL": pdl,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    if pdl:
        constants["launch_pdl"] = True  # an option that only the compiler for NVIDIA's GPUs knows
    return Combination((out.numel() // head_dim_v,), (parts, part_lse, out, lse, splits), constants)
