"""Naive attention: S = QKᵀ and P = softmax(S) are written to memory whole, which is four N x N passes over HBM.

The scale is folded into Q (N x d), so that it costs a copy of Q and no pass of its own; a mask costs one more read and write of S.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashbench.model.schedule import Schedule
from flashbench.model.tensors import seeing_queries
from flashbench.providers.spec import Bound, Provider, no_kernel_for_dtype
from flashbench.records import Device, Problem

if TYPE_CHECKING:
    from torch import Tensor

PROVIDERS = (
    Provider(
        name="naive",
        family="naive",
        algorithm="materialised",
        summary="three PyTorch calls; S and P are written to memory whole",
        unsupported=no_kernel_for_dtype,
        loader="flashbench.providers.naive:bind",
        schedule=Schedule(passes=("mask_fill", "view_copies", "grad_product"), scaled_copies=("q",)),
    ),
)


def bind(problem: Problem, device: Device) -> Bound:
    """Plain attention for `problem`. The mask is made here, once, so that no call pays for it."""
    import torch

    from flashbench.providers.masking import hidden_keys

    scale = problem.head_dim**-0.5
    group = problem.heads_q // problem.heads_kv
    dead = problem.seq_q - seeing_queries(problem)
    hidden = hidden_keys(problem, torch.device(device.kind, device.index))
    if hidden is not None:
        hidden = hidden[dead:]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        live = q[:, :, dead:]
        batch, _, rows, _ = live.shape
        # The query heads of one key/value head become rows of one product, so K and V are never copied per query head.
        grouped = (live * scale).reshape(batch, problem.heads_kv, group * rows, problem.head_dim)
        scores = grouped @ k.transpose(-1, -2)
        if hidden is not None:
            by_head = scores.view(batch, problem.heads_kv, group, rows, problem.seq_kv)
            scores = by_head.masked_fill_(hidden, float("-inf")).view_as(scores)
        weights = torch.softmax(scores, dim=-1)
        del scores
        out = (weights @ v).view(batch, problem.heads_q, rows, problem.head_dim_v)
        if dead:
            out = torch.cat([out.new_zeros(batch, problem.heads_q, dead, problem.head_dim_v), out], dim=2)
        return out

    return Bound(call)
