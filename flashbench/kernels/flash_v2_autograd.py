"""FlashAttention-2 as an operation of PyTorch's autograd."""

from __future__ import annotations

from typing import Any

import torch

from flashbench.errors import UsageError, nearest
from flashbench.kernels.autograd import attend
from flashbench.kernels.flash_v2 import flash_v2_forward
from flashbench.kernels.flash_v2_gradients import KERNELS, flash_v2_backward


def flash_v2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: str = "none",
    scale: float | None = None,
    precision: str = "ieee",
    backward: str = "two-pass",
) -> torch.Tensor:
    """`flash_v2_forward` with gradients: (B, Hq, Sq, Dv), contiguous, in the dtype of q, k and v, which may have any strides.

    `backward` is `two-pass` (the same bits at every call) or `one-pass` (five products in place of seven, and an fp32 dQ that is added
    up in memory); see `flash_v2_backward.py`. Where no gradient is asked for, this is the forward kernel and nothing else. Gradients of
    gradients are refused by autograd. Raises UsageError as `flash_v2_forward` does, and for a backward that does not exist.
    """
    if backward not in KERNELS:
        raise UsageError(f"unknown backward '{backward}'{nearest(backward, KERNELS)} (known: {', '.join(KERNELS)})")
    options: dict[str, Any] = {"mask": mask, "scale": scale, "precision": precision}
    return attend(q, k, v, flash_v2_forward, flash_v2_backward, options, backward)
