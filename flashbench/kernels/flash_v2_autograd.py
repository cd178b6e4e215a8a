"""FlashAttention-2 as an operation of PyTorch's autograd: what the forward pass keeps, and what the backward pass does with it."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from flashbench.errors import UsageError, nearest
from flashbench.kernels.flash_v2 import flash_v2_forward
from flashbench.kernels.flash_v2_gradients import KERNELS, flash_v2_backward


class _FlashV2(torch.autograd.Function):  # type: ignore[misc]  # torch does not say what it is
    """Keeps Q, K, V, O and the log-sum-exp, O(N); every score is computed again."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any], backward: str
    ) -> torch.Tensor:
        out, lse = flash_v2_forward(q, k, v, with_lse=True, **options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options, ctx.variant = options, backward
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return *flash_v2_backward(q, k, v, out, lse, d_out, variant=ctx.variant, **ctx.options), None, None


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
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        attended: torch.Tensor = _FlashV2.apply(q, k, v, options, backward)
        return attended
    out = flash_v2_forward(q, k, v, **options)
    assert isinstance(out, torch.Tensor)
    return out
