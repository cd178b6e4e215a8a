"""Problems in e4m3 for flash-v3: some that it must solve as exactly as bf16 ones, and entries that FlashAttention-3 measured its error with."""

from __future__ import annotations

from typing import NamedTuple

import torch


class InE4M3(NamedTuple):
    """A problem in e4m3, in units; what the units stand for, and the tensors that they stand for, as float64."""

    units: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    descales: torch.Tensor
    exact: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def with_descales(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, descales: torch.Tensor) -> InE4M3:
    group = q.shape[1] // k.shape[1]
    of_q, of_k, of_v = (x[:, :, None, None].double() for x in descales.unbind(-1))
    exact = (q.double() * of_q.repeat_interleave(group, 1), k.double() * of_k, v.double() * of_v)
    return InE4M3((q, k, v), descales, exact)


def powers_of_two(batch: int, heads: tuple[int, int], seq_q: int, seq_kv: int, dim: int = 64, seed: int = 0) -> InE4M3:
    """A problem whose scores are whole numbers of bits if its scale is +-ln 2, from -8 to 8: e4m3 holds each weight as it is."""
    torch.manual_seed(seed)
    heads_q, heads_kv = heads
    q, k = torch.zeros(batch, heads_q, seq_q, dim), torch.zeros(batch, heads_kv, seq_kv, dim)
    q[..., 5:9], k[..., 5:9] = torch.randint(-1, 2, (*q.shape[:3], 4)), torch.randint(-1, 2, (*k.shape[:3], 4))
    v = torch.randint(-16, 17, (batch, heads_kv, seq_kv, dim)).float()
    of_q = 2.0 ** torch.randint(-3, 4, (batch, heads_kv))
    of_k = 2.0 ** torch.randint(0, 2, (batch, heads_kv)) / of_q
    of_v = torch.rand(batch, heads_kv) + 0.5
    return with_descales(q, k, v, torch.stack([of_q, of_k, of_v], -1))


def keys_in_place(v: torch.Tensor) -> torch.Tensor:
    """V as the kernel reads it, written from what `key_at` says of each place."""
    from flashbench.kernels.flash_v3_keys_last import GROUP, key_at

    padded = -(-v.shape[2] // GROUP) * GROUP
    filled = torch.zeros(*v.shape[:2], padded, v.shape[3], dtype=v.dtype, device=v.device)
    filled[:, :, : v.shape[2]] = v
    places = torch.arange(padded, device=v.device)
    return filled[:, :, places // GROUP * GROUP + key_at(places % GROUP)].transpose(2, 3).contiguous()


def transposed(shape: tuple[int, ...], layout: str, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of V with its keys last, by the kernel that writes it so, and what they should be."""
    from flashbench.kernels.flash_v3_keys_last import keys_last

    batch, heads, seq, dim = shape
    holder_shape = (batch, seq, heads, dim) if layout == "transposed" else shape
    holder = torch.randint(0, 255, holder_shape, dtype=torch.uint8, device=device)
    v = (holder.transpose(1, 2) if layout == "transposed" else holder).view(torch.float8_e4m3fn)
    return keys_last(v).view(torch.uint8), keys_in_place(v.view(torch.uint8))


def outliers(*shape: int, device: str = "cpu") -> torch.Tensor:
    """N(0, 1), and one in a thousand with N(0, 100) on top: the entries of FlashAttention-3's table 3 (arXiv 2407.08608, section 4.3)."""
    rare = torch.rand(shape, device=device) < 1e-3
    return torch.randn(shape, device=device) + 10 * torch.randn(shape, device=device) * rare


def rmse(out: torch.Tensor, expected: torch.Tensor) -> float:
    return (out.double() - expected).square().mean().sqrt().item()
