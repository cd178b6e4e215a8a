"""Two small Triton kernels that reach a unit's ceiling: reading the L2 over and over, and nothing but exponentials."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
PROGRAMS_PER_SM = 16


@triton.jit
def _read(source, sums, elements, passes, BLOCK: tl.constexpr):
    """Every program reads its stripe of `source` `passes` times, each time from another start so that no load can be hoisted."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    total = tl.zeros([BLOCK], tl.float32)
    offsets = tl.arange(0, BLOCK)
    blocks = elements // BLOCK
    for step in range(passes * blocks // programs):
        block = (program + step * programs) % blocks
        # .cg keeps the loads out of the L1, which would otherwise answer some of them.
        total += tl.load(source + block * BLOCK + offsets, cache_modifier=".cg")
    tl.store(sums + program, tl.sum(total))


def read_repeatedly(source: torch.Tensor, passes: int) -> torch.Tensor:
    """Read `source` (fp32, resident in the L2) `passes` times; 4 * elements * passes bytes of L2 traffic."""
    sms = torch.cuda.get_device_properties(source.device).multi_processor_count
    programs = 4 * sms
    sums = torch.empty(programs, device=source.device)
    _read[(programs,)](source, sums, source.numel(), passes, BLOCK=BLOCK, num_warps=8)
    return sums


@triton.jit
def _exp2(out, count: tl.constexpr, BLOCK: tl.constexpr):
    """`count` dependent exp2 of each of BLOCK values."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = -(offsets % 7).to(tl.float32) * 0.1
    for _ in range(count):
        x = tl.exp2(-x)
    tl.store(out + offsets, x)


def exponentials(device: torch.device, sm_count: int, count_only: bool = False) -> torch.Tensor | int:
    """exp2 on every SM at once; with `count_only` the number of exponentials that a call computes."""
    block, per_element = 1024, 1024
    programs = PROGRAMS_PER_SM * sm_count
    if count_only:
        return programs * block * per_element
    out = torch.empty(programs * block, device=device)
    _exp2[(programs,)](out, per_element, BLOCK=block, num_warps=4)
    return out
