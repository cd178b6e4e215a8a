"""Counters in global memory that a launch finds at 0 and leaves at 0, so that no call has to clear any.

They are dealt out round a ring: launches on several streams at once do not share one unless the whole ring was dealt out in between. A
CUDA graph keeps those that it was captured with, and its replays follow one another.
"""

from __future__ import annotations

import functools

import torch

RING = 2**18
"""Counters of a device, 1 MiB: one each for 65,536 launches, 1,024 each for 256."""
MOST = RING // 64
"""More for a single launch are made for it alone, so that 64 launches at the least have some of their own."""
APART = 4
"""A launch's counters begin at a multiple of 16 bytes: to Triton's compiler their addresses look alike."""
_dealt: dict[torch.device, int] = {}


@functools.cache
def _ring(device: torch.device) -> torch.Tensor:
    return torch.zeros(RING, dtype=torch.int32, device=device)


def next_counters(device: torch.device, count: int = 1) -> torch.Tensor:
    """int32, at least `count` of them, all 0, that none of the last launches uses; the launch has to leave them 0."""
    if count > MOST:
        return torch.zeros(count, dtype=torch.int32, device=device)
    first = _dealt.get(device, 0)
    if first + count > RING:
        first = 0
    _dealt[device] = first + -(-count // APART) * APART
    return _ring(device)[first:]
