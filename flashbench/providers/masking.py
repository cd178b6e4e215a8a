"""The boolean mask of a problem as a tensor, for providers that take one. Its definition is model/masks.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashbench.records import Problem

if TYPE_CHECKING:
    import torch


def hidden_keys(problem: Problem, device: torch.device) -> torch.Tensor | None:
    """(seq_q, seq_kv) boolean, True where the key is hidden; None when every query sees every key."""
    import torch

    if problem.mask == "none" or (problem.mask == "causal" and problem.seq_q == 1):
        return None
    # Query i sees keys up to i + seq_kv - seq_q (bottom-right aligned); tests hold this against model/masks.visible_range.
    last = torch.arange(problem.seq_q, device=device)[:, None] + (problem.seq_kv - problem.seq_q)
    key = torch.arange(problem.seq_kv, device=device)[None, :]
    hidden = key > last
    if problem.window is not None:
        hidden |= key <= last - problem.window
    return hidden
