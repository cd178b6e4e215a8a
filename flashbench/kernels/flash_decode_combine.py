"""The second step of decoding: what the splits of a row found, made one output by the weights that their sums of exponentials give them.

Split i leaves its own normalised output o_i and log-sum-exp L_i, a natural logarithm as everywhere outside a kernel's registers:

    L = log sum_i exp(L_i)        out = sum_i exp(L_i - L) o_i

A split that saw no key has L_i = -inf and weight 0. Cost: splits x rows x (d_v + 1) x 4 bytes, written by the splits and, at usual sizes,
read here from the L2. Two ways, each of which gives the same bits every time, since it reads all parts from memory and adds them in the
order of the splits:

- The program that ends last adds up the rows of its block (`is_last`; nobody waits). No second launch: even a programmatic dependent takes
  1.4 of the 22 microseconds of a cache of 32 MiB (on an H200). But one program reads what others wrote, while they have nothing to do.
- `combine_kernel`, one program a row, for parts of more than FUSED_BYTES, as of a long sequence whose heads share one key/value head. On
  sm_90 and later it is launched as a programmatic dependent, ready when the first kernel ends, which hides most of the launch.
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
FUSED_BYTES = 64 * 1024
"""Most parts of a block of rows that its last program adds up. Measured on an H200, 8 key/value heads of 4 query heads, head dimension 128:
32 splits of 4 rows (64 KiB) in 21.0 us rather than 22.4; 49 of a longer cache (98 KiB) in 141.0 rather than 138.6."""


def tile_of_parts(rows: int, dv: int) -> tuple[int, int]:
    """Rows, and parts of each, that are added up at a time, both powers of two, of up to `rows` rows of `dv` (a power of two) channels."""
    at_once = min(1 << (rows - 1).bit_length(), 16)
    return at_once, TILE_ELEMENTS // (at_once * dv)


@triton.jit
def is_last(counter, programs):
    """Whether all others of `programs` programs have been here before; what they stored until then can be read. Leaves the counter 0.

    The barrier makes the stores of all threads of this program those of the one that counts, which releases them to the whole device.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def add_up(
    parts, part_lse,  # contiguous (rows, splits, HEAD_DIM_V) and (rows, splits), fp32
    o, lse,  # contiguous (rows, HEAD_DIM_V) and (rows,); lse may be None
    row, there,  # (ROWS,): numbers of the rows to add up, int64, and which of them exist
    splits,
    HEAD_DIM_V: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Fills some rows of the output: an online softmax over SPLITS parts at a time."""
    column = tl.arange(0, DV)
    acc = tl.zeros([ROWS, DV], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)  # in bits
    for first in range(0, splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        at = row[:, None] * splits + split[None, :]
        has_part = there[:, None] & (split < splits)[None, :]
        # Other multiprocessors wrote the parts, so that they are in the L2 and in no L1.
        bits = tl.load(part_lse + at, mask=has_part, other=float("-inf"), cache_modifier=".cg") * LOG2_E
        keep = has_part[:, :, None]
        if DV != HEAD_DIM_V:
            keep = keep & (column < HEAD_DIM_V)[None, None, :]
        part = tl.load(
            parts + at[:, :, None] * HEAD_DIM_V + column[None, None, :], mask=keep, other=0.0, cache_modifier=".cg"
        )
        new_top = tl.maximum(top, tl.max(bits, 1))
        origin = tl.where(new_top == float("-inf"), 0.0, new_top)  # no key seen yet: -inf - -inf would be NaN
        alpha = tl.exp2(top - origin)
        weight = tl.exp2(bits - origin[:, None])
        acc = acc * alpha[:, None] + tl.sum(part * weight[:, :, None], 1)
        total = total * alpha + tl.sum(weight, 1)
        top = new_top
    divisor = tl.where(total > 0.0, total, 1.0)
    keep = there[:, None]
    if DV != HEAD_DIM_V:
        keep = keep & (column < HEAD_DIM_V)[None, :]
    out = acc / divisor[:, None]
    tl.store(o + row[:, None] * HEAD_DIM_V + column[None, :], out.to(o.dtype.element_ty), mask=keep)
    if lse is not None:
        tl.store(lse + row, (top + tl.log2(divisor)) * LN_2, mask=there)


@triton.jit(do_not_specialize=("splits",))
def combine_kernel(
    parts, part_lse, o, lse, splits,  # as for add_up
    HEAD_DIM_V: tl.constexpr, DV: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    if PDL:
        gdc_wait()  # this kernel may have been started before the first one had ended
    add_up(parts, part_lse, o, lse, row, row >= 0, splits, HEAD_DIM_V, DV, 1, SPLITS)


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
        "SPLITS": tile_of_parts(1, padded(head_dim_v))[1],
        "PDL": pdl,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    if pdl:
        constants["launch_pdl"] = True  # an option that only the compiler for NVIDIA's GPUs knows
    return Combination((out.numel() // head_dim_v,), (parts, part_lse, out, lse, splits), constants)
