"""FlashAttention-2, backward, in portable Triton: dQ, dK and dV from Q, K, V, dO and one number a row, the log-sum-exp of its scores.

Idea. With S = scale Q K^T, P = softmax(S) and O = P V, the chain rule asks for five products over the same N x M tiles:

    S = scale Q K^T     P = exp(S - lse)     dP = dO V^T     dS = P * (dP - delta)
    dV = P^T dO         dK = scale dS^T Q                    dQ = scale dS K

Nothing of it was stored. The forward pass kept each row's log-sum-exp, from which P is recomputed in one step, without a running
maximum; and the sum that softmax's derivative needs, delta_i = sum_j P_ij dP_ij, is dO_i . O_i, so that it is known before the first tile
(`flash_v2_delta.py`; FlashAttention-2, Dao, arXiv 2307.08691, section 3.1.2 and algorithm 2).

Two of the sums run over queries and one over keys, and a program can hold only one of the two. Hence two variants:

- two passes: `flash_v2_keys_kernel` holds a block of keys, with dK and dV in registers, and runs over the queries of all heads that share
  them; `flash_v2_queries_kernel` holds a block of queries, with dQ, and runs over the keys. S and dP are computed twice, seven products
  in all. Every sum has one owner and one order: the same bits at every call. (Triton's tutorial 06 does so too.)
- one pass: the first kernel also makes dS K and adds it into an fp32 dQ in memory, in the order in which programs happen to come: five
  products, and N M d / BLOCK_KV additions in the L2 per head, whose order moves the last bits from call to call. On sm_90 a tile goes out
  as one reduction of the copy engine (cp.reduce.async.bulk), elsewhere as atomic additions.

What makes it quick:

- The keys kernel computes S^T = K Q^T and dP^T = V dO^T. They come out with keys as rows, as the left operands of P^T dO and dS^T Q have
  them: P and dS go from product to product in registers (FlashAttention-3, arXiv 2407.08608, and its public code swap them so too).
- scale * log2 e is folded into one multiply-add, lse is brought in bits, and `scale` multiplies dK and dQ once, at the end.
- Only tiles on the diagonal, on a window's edge or at the end of a sequence are masked, in loops of their own.
- exp2 needs S alone and stands between the products S and dP, so that it runs beside dP; those of dV and dK are still under way when
  the next S is asked for. For that, nothing may be waited for between P and dS: with delta loaded there, ptxas made every product wait
  for the one before ("wgmma.mma_async instructions are serialized"; Triton 3.6, sm_90). A test reads its log.
- Where the mask is causal, the longest rows of tiles start first: the last queries, but the first keys.

Cost of one call, for B sequences, H query heads, H_kv key/value heads, N queries, M keys, head dimension d, elements of s bytes:

    FLOPs      10 B H N M d for the five products (half of it causal), 14 B H N M d executed by two passes; B H N M exponentials a pass
    HBM bytes  s B (5 H N d + 4 H_kv M d): Q, O, dO twice, K, V in; dQ, dK, dV out. Two passes: Q, dO, K and V once more. One pass: up
               to 16 B H N d for the fp32 dQ (zeros, sums read and written, conversion), less what stays in the L2
    shared     keys: s (2 BLOCK_KV + 2 num_stages BLOCK_Q) d; queries the same with the blocks exchanged: 96 KiB at 64 x 64, d = 128, bf16,
               2 stages. One pass: s BLOCK_Q BLOCK_KV + 4 BLOCK_Q d more
    registers  keys: dK, dV, S and dP in fp32, 2 (d + BLOCK_Q) BLOCK_KV over the threads of a program: 192 a thread at 64 x 64, d = 128,
               4 warps; queries: (d + 2 BLOCK_KV) BLOCK_Q, 128 a thread
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashbench.kernels.flash_v2_delta import PADDING
from flashbench.kernels.schedule import assigned, dealt, key_ranges, query_ranges, visible
from flashbench.kernels.tiles import load_rows

COUNTS = ("batch_heads", "heads", "heads_per_kv_head", "seq_q", "seq_kv", "window", "sections")


@triton.jit(do_not_specialize=COUNTS)
def flash_v2_keys_kernel(
    q, k, v, d_out,  # pointers, or tensor descriptors of shape (batch, heads, seq, head dim)
    lse_bits, delta,  # (batch, heads_q, padded seq_q), of the pre-pass
    dk, dv,  # pointers to contiguous (batch, heads_kv, seq_kv, head dim)
    dq_sums,  # None, or fp32 zeros (batch, heads_q, seq_q, HEAD_DIM), contiguous: a pointer or a descriptor
    q_strides, k_strides, v_strides, d_out_strides,
    batch_heads, heads, heads_per_kv_head, seq_q, seq_kv, window,
    scale, scale_log2,
    sections,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TAIL: tl.constexpr,
    WITH_DQ: tl.constexpr, PRECISION: tl.constexpr, DESCRIPTORS: tl.constexpr, BULK_ADD: tl.constexpr,
):  # fmt: skip
    """dK and dV of a block of keys; dQ too, added up in memory, if WITH_DQ."""
    # Key block 0 is seen by the most queries: ascending order is longest first.
    head, key_block = dealt(tl.program_id(0), batch_heads, tl.cdiv(seq_kv, BLOCK_KV), sections, 1, CAUSAL)
    batch = head // heads
    head_kv = head % heads
    first_key = key_block * BLOCK_KV
    shift = seq_kv - seq_q
    key = first_key + tl.arange(0, BLOCK_KV)
    padded_q = tl.cdiv(seq_q, PADDING) * PADDING

    last_key = tl.minimum(first_key + BLOCK_KV, seq_kv) - 1
    bounds = query_ranges(first_key, last_key, shift, seq_q, window, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW)
    k_tile = load_rows(k, k_strides, batch, head_kv, first_key, seq_kv, HEAD_DIM, BLOCK_KV, D, True, DESCRIPTORS)
    v_tile = load_rows(v, v_strides, batch, head_kv, first_key, seq_kv, HEAD_DIM_V, BLOCK_KV, DV, True, DESCRIPTORS)
    dk_sum = tl.zeros([BLOCK_KV, D], tl.float32)
    dv_sum = tl.zeros([BLOCK_KV, DV], tl.float32)

    for member in tl.range(heads_per_kv_head):
        head_q = head_kv * heads_per_kv_head + member
        one_head = tl.cast(head, tl.int64) * heads_per_kv_head + member
        # Part 0 is the diagonal, 1 the steady loop, 2 a window's far edge or the tail.
        for part in tl.static_range(0 if CAUSAL else 1, 3 if TAIL or WINDOW else 2):
            for row in tl.range(bounds[part], bounds[part + 1], BLOCK_Q):
                rows = row + tl.arange(0, BLOCK_Q)
                q_tile = load_rows(
                    q, q_strides, batch, head_q, row, seq_q, HEAD_DIM, BLOCK_Q, D, part != 1, DESCRIPTORS
                )
                top = load_statistic(lse_bits, one_head, row, padded_q, BLOCK_Q, DESCRIPTORS)
                s = tl.dot(k_tile, q_tile.T, input_precision=PRECISION)
                d_out_tile = load_rows(
                    d_out, d_out_strides, batch, head_q, row, seq_q, HEAD_DIM_V, BLOCK_Q, DV, part != 1, DESCRIPTORS
                )
                d_p = tl.dot(v_tile, d_out_tile.T, input_precision=PRECISION)
                bits = s * scale_log2 - top[None, :]
                if part != 1:  # masked before the exponential: what is not seen may lie far above the log-sum-exp
                    seen = visible(shift + rows, key, seq_kv, window, CAUSAL, WINDOW).T
                    bits = tl.where(seen, bits, float("-inf"))
                p = tl.exp2(bits)
                offset = load_statistic(delta, one_head, row, padded_q, BLOCK_Q, DESCRIPTORS)
                dv_sum = tl.dot(p.to(d_out_tile.dtype), d_out_tile, dv_sum, input_precision=PRECISION)
                d_s = (p * (d_p - offset[None, :])).to(q_tile.dtype)
                dk_sum = tl.dot(d_s, q_tile, dk_sum, input_precision=PRECISION)
                if WITH_DQ:
                    d_q = tl.dot(d_s.T, k_tile, input_precision=PRECISION)
                    if BULK_ADD:
                        dq_sums.atomic_add([batch, head_q, row, 0], d_q.reshape(1, 1, BLOCK_Q, D))
                    else:
                        columns = tl.arange(0, D)
                        at = (one_head * seq_q + rows)[:, None] * HEAD_DIM + columns[None, :]
                        tl.atomic_add(
                            dq_sums + at,
                            d_q,
                            mask=(rows < seq_q)[:, None] & (columns < HEAD_DIM)[None, :],
                            sem="relaxed",
                        )

    key_row = head.to(tl.int64) * seq_kv + key
    store_rows(dk, dk_sum * scale, key_row, key < seq_kv, HEAD_DIM, D)
    store_rows(dv, dv_sum, key_row, key < seq_kv, HEAD_DIM_V, DV)


@triton.jit
def load_statistic(source, head, row, padded_q, ROWS: tl.constexpr, DESCRIPTOR: tl.constexpr):
    """Numbers of ROWS queries from `row` on, of a (batch * heads, padded_q) array."""
    if DESCRIPTOR:
        values = source.load([tl.cast(head, tl.int32), row]).reshape(ROWS)
    else:
        values = tl.load(source + head * padded_q + row + tl.arange(0, ROWS))
    return values


@triton.jit
def store_rows(target, values, row, keep, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of a contiguous tensor, in its dtype."""
    column = tl.arange(0, COLUMNS)
    mask = keep[:, None]
    if COLUMNS != CHANNELS:
        mask = mask & (column < CHANNELS)[None, :]
    tl.store(target + row[:, None] * CHANNELS + column[None, :], values.to(target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=COUNTS)
def flash_v2_queries_kernel(
    q, k, v, d_out, lse_bits, delta,
    dq,
    q_strides, k_strides, v_strides, d_out_strides,
    batch_heads, heads, heads_per_kv_head, seq_q, seq_kv, window,
    scale, scale_log2,
    sections,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TAIL: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """dQ of a block of queries."""
    head, q_block = assigned(
        tl.program_id(0), batch_heads, tl.cdiv(seq_q, BLOCK_Q), sections, heads_per_kv_head, CAUSAL
    )
    batch = head // heads
    head_q = head % heads
    head_kv = head_q // heads_per_kv_head
    first_row = q_block * BLOCK_Q
    shift = seq_kv - seq_q
    rows = first_row + tl.arange(0, BLOCK_Q)
    padded_q = tl.cdiv(seq_q, PADDING) * PADDING

    bounds = key_ranges(
        shift + first_row, shift + tl.minimum(first_row + BLOCK_Q, seq_q) - 1, seq_kv, window, BLOCK_KV, CAUSAL, WINDOW
    )
    q_tile = load_rows(q, q_strides, batch, head_q, first_row, seq_q, HEAD_DIM, BLOCK_Q, D, True, DESCRIPTORS)
    d_out_tile = load_rows(
        d_out, d_out_strides, batch, head_q, first_row, seq_q, HEAD_DIM_V, BLOCK_Q, DV, True, DESCRIPTORS
    )
    statistics = head.to(tl.int64) * padded_q + rows
    top = tl.load(lse_bits + statistics)
    offset = tl.load(delta + statistics)
    dq_sum = tl.zeros([BLOCK_Q, D], tl.float32)

    for part in tl.static_range(0 if WINDOW else 1, 3 if CAUSAL or TAIL else 2):
        for key in tl.range(bounds[part], bounds[part + 1], BLOCK_KV):
            k_tile = load_rows(k, k_strides, batch, head_kv, key, seq_kv, HEAD_DIM, BLOCK_KV, D, part != 1, DESCRIPTORS)
            s = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)
            v_tile = load_rows(
                v, v_strides, batch, head_kv, key, seq_kv, HEAD_DIM_V, BLOCK_KV, DV, part != 1, DESCRIPTORS
            )
            d_p = tl.dot(d_out_tile, v_tile.T, input_precision=PRECISION)
            bits = s * scale_log2 - top[:, None]
            if part != 1:
                seen = visible(shift + rows, key + tl.arange(0, BLOCK_KV), seq_kv, window, CAUSAL, WINDOW)
                bits = tl.where(seen, bits, float("-inf"))
            p = tl.exp2(bits)
            d_s = (p * (d_p - offset[:, None])).to(k_tile.dtype)
            dq_sum = tl.dot(d_s, k_tile, dq_sum, input_precision=PRECISION)

    store_rows(dq, dq_sum * scale, head.to(tl.int64) * seq_q + rows, rows < seq_q, HEAD_DIM, D)
