"""e4m3 tensors: 3 bits of mantissa, an end at 448, and so a scale for each batch and key/value head, as FlashAttention-3's interface has it."""

from __future__ import annotations

from typing import NamedTuple

import torch

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max


class Quantized(NamedTuple):
    """An attention problem's tensors in e4m3."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    descales: torch.Tensor
    """(batch, heads_kv, 3) fp32: what one unit of q, k and v stands for in the heads of each group."""


def quantized(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Quantized:
    """q (B, Hq, Sq, D), k and v (B, Hkv, Skv, .) in e4m3, the largest number of each batch and key/value head at 448; contiguous."""
    (q_units, of_q), (k_units, of_k), (v_units, of_v) = (_in_units(x, k.shape[1]) for x in (q, k, v))
    return Quantized(q_units, k_units, v_units, torch.stack([of_q, of_k, of_v], -1))


def _in_units(x: torch.Tensor, heads_kv: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x (batch, heads, seq, channels) in e4m3, and its units (batch, heads_kv)."""
    grouped = x.float().unflatten(1, (heads_kv, -1))
    largest = grouped.abs().amax((2, 3, 4))
    unit = torch.where(largest > 0, largest / LARGEST, 1.0)
    # A quotient may pass 448 by a rounding, and e4m3 has no infinity to be rounded to.
    inside = (grouped / unit[:, :, None, None, None]).clamp(-LARGEST, LARGEST)
    return inside.to(E4M3).reshape(x.shape).contiguous(), unit
