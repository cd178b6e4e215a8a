"""A kernel that writes down which work each program would take."""

import triton
import triton.language as tl

from flashbench.kernels.schedule import assigned


@triton.jit
def record_order(found, batch_heads, q_blocks, heads_per_section, CAUSAL: tl.constexpr):
    program = tl.program_id(0)
    head, q_block = assigned(program, batch_heads, q_blocks, heads_per_section, CAUSAL)
    tl.store(found + 2 * program, head)
    tl.store(found + 2 * program + 1, q_block)
