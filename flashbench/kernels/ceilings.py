"""Small Triton kernels that reach a unit's ceiling: reading the L2 over and over, nothing but exponentials, and nothing at all."""

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


READ_PROGRAMS_PER_SM = 4


def read_repeatedly(source: torch.Tensor, passes: int, sm_count: int) -> torch.Tensor:
    """Read `source` (fp32, resident in the L2) about `passes` times; see `bytes_read_repeatedly`."""
    programs = READ_PROGRAMS_PER_SM * sm_count
    sums = torch.empty(programs, device=source.device)
    _read[(programs,)](source, sums, source.numel(), passes, BLOCK=BLOCK, num_warps=8)
    return sums


def bytes_read_repeatedly(elements: int, passes: int, sm_count: int) -> int:
    """What `read_repeatedly` really reads of `elements` fp32 values: whole blocks, the same number by each program."""
    programs = READ_PROGRAMS_PER_SM * sm_count
    return passes * (elements // BLOCK) // programs * programs * BLOCK * 4


@triton.jit
def _nothing(out):
    tl.store(out, 0.0)


def nothing(device: torch.device) -> None:
    """One program that stores one number: a kernel without work."""
    _nothing[(1,)](torch.empty(1, device=device), num_warps=1)


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
