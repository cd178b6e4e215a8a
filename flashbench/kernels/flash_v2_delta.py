"""Row statistics of FlashAttention's backward passes: delta_i = dO_i . O_i, and the log-sum-exp in bits.

delta is the sum that softmax's derivative takes over a whole row, sum_j P_ij dP_ij. Since dP = dO V^T and O = P V, it is dO_i . O_i, d
products in place of M (Dao, arXiv 2307.08691, algorithm 2, line 4). A kernel of its own reads O and dO once and writes both numbers, 8
bytes a row: s B H N 2 d_v bytes in, so it runs at the speed of the memory.

Rows are padded to a multiple of ROW_PADDING, so that the kernels that follow load blocks of them without a mask. A row that does not
exist, and one that saw no key (lse = -inf), gets lse = +inf: its weights exp2(s - inf) are then 0 whatever the scores, and no gradient
needs a mask for it.

Where the kernel that follows adds dQ up in memory, its sums can start at 0 here: 4 B H N d bytes more, and one launch less.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from flashbench.kernels.tiles import load_rows

ROW_PADDING = 128
"""A multiple of every query block."""
PADDING: tl.constexpr = tl.constexpr(ROW_PADDING)
LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))


@triton.jit(do_not_specialize=("heads", "seq_q"))
def flash_v2_delta_kernel(
    out, d_out, lse,  # lse: contiguous (batch * heads, seq_q)
    lse_bits, delta,  # contiguous (batch * heads, padded seq_q)
    out_strides, d_out_strides,
    heads, seq_q,
    HEAD_DIM_V: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr,
    sums=None,  # contiguous (batch * heads, seq_q, HEAD_DIM), to be filled with zeros, or None
    HEAD_DIM: tl.constexpr = 0, D: tl.constexpr = 0,
):  # fmt: skip
    padded_q = tl.cdiv(seq_q, PADDING) * PADDING
    blocks = padded_q // ROWS
    head = tl.program_id(0) // blocks
    first_row = tl.program_id(0) % blocks * ROWS
    batch = head // heads
    rows = first_row + tl.arange(0, ROWS)
    o = load_rows(out, out_strides, batch, head % heads, first_row, seq_q, HEAD_DIM_V, ROWS, DV, True, False)
    d_o = load_rows(d_out, d_out_strides, batch, head % heads, first_row, seq_q, HEAD_DIM_V, ROWS, DV, True, False)
    natural = tl.load(lse + head.to(tl.int64) * seq_q + rows, mask=rows < seq_q, other=float("-inf"))
    at = head.to(tl.int64) * padded_q + rows
    tl.store(lse_bits + at, tl.where(natural == float("-inf"), float("inf"), natural * LOG2_E))
    tl.store(delta + at, tl.sum(o.to(tl.float32) * d_o.to(tl.float32), 1))
    if sums is not None:
        channels = tl.arange(0, D)
        first = sums + (head.to(tl.int64) * seq_q + first_row) * HEAD_DIM
        there = (rows < seq_q)[:, None] & (channels < HEAD_DIM)[None, :]
        pointers = first + tl.arange(0, ROWS)[:, None] * HEAD_DIM + channels[None, :]
        tl.store(pointers, tl.zeros([ROWS, D], tl.float32), mask=there)


def rows_per_program(padded_head_dim_v: int) -> int:
    """Rows of a program: 8,192 elements of O and of dO in registers, 64 a thread at most."""
    return max(16, min(ROW_PADDING, 8192 // padded_head_dim_v))
