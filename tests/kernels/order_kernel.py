"""Kernels that write down which work each program would take."""

import triton
import triton.language as tl

from flashbench.kernels.schedule import assigned, query_ranges


@triton.jit
def record_order(found, heads, q_blocks, sections, group, CAUSAL: tl.constexpr):
    program = tl.program_id(0)
    head, q_block = assigned(program, heads, q_blocks, sections, group, CAUSAL)
    tl.store(found + 2 * program, head)
    tl.store(found + 2 * program + 1, q_block)


@triton.jit
def record_query_ranges(
    found, first_key, seq_q, seq_kv, window,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    last_key = tl.minimum(first_key + BLOCK_KV, seq_kv) - 1
    low, steady_low, steady_high, high = query_ranges(
        first_key, last_key, seq_kv - seq_q, seq_q, window, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW
    )
    tl.store(found, low)
    tl.store(found + 1, steady_low)
    tl.store(found + 2, steady_high)
    tl.store(found + 3, high)
