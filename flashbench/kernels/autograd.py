"""A forward and a backward kernel as one operation of PyTorch's autograd: what the former keeps, and what the latter does with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

Kernel = Callable[..., Any]


class _Attention(torch.autograd.Function):  # type: ignore[misc]  # torch does not say what it is
    """Keeps Q, K, V, O and the log-sum-exp, O(N); every score is computed again."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        forward: Kernel,
        backward: Kernel,
        options: dict[str, Any],
        variant: str,
    ) -> torch.Tensor:
        out: torch.Tensor
        out, lse = forward(q, k, v, with_lse=True, **options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.backward_kernel, ctx.options, ctx.variant = backward, options, variant
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        gradients = ctx.backward_kernel(q, k, v, out, lse, d_out, variant=ctx.variant, **ctx.options)
        return *gradients, None, None, None, None


def wants_gradients(*tensors: torch.Tensor) -> bool:
    """Whether autograd is going to ask for a gradient of any of them."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    forward: Kernel,
    backward: Kernel,
    options: dict[str, Any],
    variant: str,
) -> torch.Tensor:
    """`forward(q, k, v, **options)`, (B, Hq, Sq, Dv), with gradients by `backward(q, k, v, out, lse, d_out, variant=, **options)` where any is asked
    for; without, the forward kernel and nothing else. Gradients of gradients are refused by autograd."""
    if wants_gradients(q, k, v):
        attended: torch.Tensor = _Attention.apply(q, k, v, forward, backward, options, variant)
        return attended
    out = forward(q, k, v, **options)
    assert isinstance(out, torch.Tensor)
    return out
