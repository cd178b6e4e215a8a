"""dQ of its sums: what flash-v3's backward kernel added up in fp32, times the scale, in the dtype of Q.

It reads 4 B H N d bytes and writes half as many, at the speed of the memory. It walks from the last element to the first, since the last to be
added up are still in the L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashbench.kernels.flash_v2_launches import KernelLaunch

ELEMENTS = 4096
"""Of a program: 32 a thread, whose 8 loads of 16 bytes are all under way together."""


@triton.jit
def flash_v3_sums_kernel(
    sums, dq,  # both contiguous, of one shape
    count, scale, ELEMENTS: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    at = block.to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    there = at < count
    total = tl.load(sums + at, mask=there)
    tl.store(dq + at, (total * scale).to(dq.dtype.element_ty), mask=there)


def sums_launch(sums: torch.Tensor, dq: torch.Tensor, scale: float) -> KernelLaunch:
    count = sums.numel()
    return KernelLaunch(
        flash_v3_sums_kernel, (triton.cdiv(count, ELEMENTS),), (sums, dq, count, scale), {"ELEMENTS": ELEMENTS}
    )
