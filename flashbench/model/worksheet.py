"""The figures that the argument for flash attention rests on, worked out by this tool's own models; standard library only.

What a paper says stands beside them as *cited*, and what a data sheet says as *spec*.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flashbench.hardware.catalogue import GpuSpec
from flashbench.hardware.catalogue import get as gpu
from flashbench.model.flops import backward_flops, forward_flops, softmax_ops, useful_flops
from flashbench.model.memory import footprint, kv_cache_bytes
from flashbench.model.schedule import Schedule
from flashbench.model.tensors import tensors
from flashbench.model.traffic import arithmetic_intensity, traffic
from flashbench.records import Problem


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of a sheet."""

    name: str
    value: float
    unit: str
    formula: str
    source: Literal["modelled", "spec"] = "modelled"


@dataclass(frozen=True, slots=True)
class Share:
    """What an arithmetic intensity allows on a card: min(1, intensity / ridge)."""

    gpu: str
    peak_tflops: float
    hbm_gbps: float
    ridge: float
    materialised: float
    qk: float
    flash: float


def head(seq_len: int, head_dim: int, dtype: str) -> Problem:
    """One dense head of one batch."""
    return Problem(1, 1, 1, seq_len, seq_len, head_dim, head_dim, dtype)


def work(p: Problem) -> list[Figure]:
    """Work, traffic and intensity of one head, materialised and tiled, forward and backward."""
    plain, flash = traffic("materialised", p), traffic("tiled-v2", p)
    transposed = traffic("tiled-v2", p, schedule=Schedule(transposes_v=True))
    products, softmax = forward_flops(p), softmax_ops(p)
    n, d, s = "N", "d", "s"
    dims = sorted({64, 128, p.head_dim})
    kept, stored = (footprint(a, dataclasses.replace(p, mode="backward")).kept for a in ("tiled-v2", "materialised"))
    return [
        Figure(
            "one N x N matrix of scores", tensors(p).scores / 1e6, "MB", f"{n}²·{s} = {p.seq_q * p.seq_kv:,} elements"
        ),
        Figure("the two matrix products", products / 1e9, "GFLOP", f"4{n}²{d}"),
        Figure("with the softmax", (products + softmax) / 1e9, "GFLOP", f"4{n}²{d} + 5{n}²"),
        Figure("HBM traffic, materialised", plain.estimate / 1e6, "MB", "write S, read S, write P, read P; Q, K, V, O"),
        Figure("HBM traffic, flash", flash.estimate / 1e6, "MB", "Q, K, V, O and one log-sum-exp a row"),
        *(
            [Figure("with V transposed first", transposed.estimate / 1e6, "MB", "and V written and read once more")]
            if p.dtype == "fp8"
            else []
        ),
        Figure("N x N traffic, flash", 0, "MB", "no score reaches HBM"),
        Figure(
            "intensity, materialised", _intensity(products + softmax, plain.estimate), "FLOP/byte", "with the softmax"
        ),
        *(
            Figure(
                f"intensity of QKᵀ alone, d = {dim}",
                qk_intensity(p, dim),
                "FLOP/byte",
                f"2{n}²{d} / ({n}²{s} + 2{n}{d}{s})",
            )
            for dim in dims
        ),
        Figure(
            "intensity, flash",
            arithmetic_intensity(products, flash).estimate,
            "FLOP/byte",
            f"4{n}²{d} over its traffic",
        ),
        Figure(
            "backward, matrices stored", backward_flops(p, recomputed=False) / 1e9, "GFLOP", f"8{n}²{d}, four products"
        ),
        Figure(
            "backward, recomputed (flash)",
            backward_flops(p) / 1e9,
            "GFLOP",
            f"10{n}²{d}, five products: +25 %, in all +1/6",
        ),
        Figure("kept for backward, materialised", stored / 1e6, "MB", "P and O: O(N²)"),
        Figure("kept for backward, flash", kept / 1e6, "MB", "O and the row statistics: O(N)"),
    ]


def _intensity(flops: int, moved_bytes: int) -> float:
    return flops / moved_bytes


def qk_intensity(p: Problem, head_dim: int) -> float:
    """FLOP/byte of QKᵀ as a matrix product of its own."""
    q = dataclasses.replace(p, head_dim=head_dim, head_dim_v=head_dim)
    return arithmetic_intensity(useful_flops(q, "gemm-qk"), traffic("gemm-qk", q)).estimate


def shares(p: Problem, specs: Sequence[GpuSpec]) -> list[Share]:
    """How much of each card's peak the intensities of `work` allow; a card without a peak at the dtype is left out."""
    flops = forward_flops(p)
    plain = _intensity(flops + softmax_ops(p), traffic("materialised", p).estimate)
    flash = arithmetic_intensity(flops, traffic("tiled-v2", p)).estimate
    found = []
    for spec in specs:
        peak, ridge = spec.peak_tflops(p.dtype), spec.ridge(p.dtype)
        if peak is not None and ridge is not None:
            allowed = [min(1.0, intensity / ridge) for intensity in (plain, qk_intensity(p, p.head_dim), flash)]
            found.append(Share(spec.id, peak, spec.hbm_gbps, ridge, *allowed))
    return found


def kv_cache(
    layers: int, kv_heads: int, head_dim: int, tokens: int, dtype: str, specs: Sequence[GpuSpec]
) -> list[Figure]:
    """Size of a model's KV cache, and how long a card takes to read it once, which every decoded token does."""
    whole = Problem(1, kv_heads, kv_heads, 1, tokens, head_dim, head_dim, dtype, mode="decode")
    total = kv_cache_bytes(whole, layers)
    token = kv_cache_bytes(dataclasses.replace(whole, seq_kv=1), layers)
    figures = [
        Figure(
            "one token",
            token / 1024,
            "KiB",
            f"2 · {layers} layers · {kv_heads} KV heads · {head_dim} · {whole.element_bytes} B",
        ),
        Figure(f"{tokens:,} tokens", total / 1e9, "GB", f"{token:,} B · {tokens:,}"),
        Figure("the same", total / 2**30, "GiB", "/ 2³⁰"),
    ]
    figures += [
        Figure(
            f"to read it once, {spec.id}",
            total / spec.hbm_gbps / 1e6,
            "ms",
            f"at {spec.hbm_gbps:,.0f} GB/s (spec): the least a token takes",
        )
        for spec in specs
    ]
    return figures


@dataclass(frozen=True, slots=True)
class Cited:
    """A figure of a paper, beside what this tool models of the same thing; a paper's count need not be this tool's."""

    name: str
    cited_gflops: float
    cited_gb: float
    cited_ms: float
    modelled_gflop: float
    modelled_gb: tuple[float, float]
    """Least and most that the model allows."""
    provider: str
    """The provider of this tool that is measured in its place."""


PAPER = (
    "Dao et al. 2022 (FlashAttention), figure 2: GPT-2 medium, one attention layer, forward and backward, on an A100"
)
GPT2_MEDIUM = Problem(64, 16, 16, 1024, 1024, 64, 64, "fp16", mode="forward_backward")


def paper() -> tuple[Cited, Cited]:
    """The paper's row, plain and flash, beside the model's brackets.

    Plain attention: without and with a mask and dropout in passes of their own, since the paper does not say which its baseline
    makes. Flash: from compulsory traffic to no reuse, with fp32 temporaries, in the first algorithm's loop order.
    """
    p, a100 = GPT2_MEDIUM, gpu("a100-sxm4-40gb")
    bare = traffic("materialised", p, l2_bytes=a100.l2_bytes)
    masked = dataclasses.replace(p, mask="causal")
    full = traffic("materialised", masked, l2_bytes=a100.l2_bytes, schedule=Schedule(passes=("mask_fill", "dropout")))
    flash = traffic("tiled-v1", p, schedule=Schedule(block_kv=256, accumulator_bytes=4))
    forward = forward_flops(p)
    plain_gflop, flash_gflop = ((forward + backward_flops(p, recomputed=r)) / 1e9 for r in (False, True))
    return (
        Cited("plain", 66.6, 40.3, 41.7, plain_gflop, (bare.estimate / 1e9, full.estimate / 1e9), "naive"),
        Cited("flash", 75.2, 4.4, 7.3, flash_gflop, (flash.low / 1e9, flash.high / 1e9), "sdpa-flash"),
    )
