"""The launches of FlashAttention-2's backward pass: row statistics, then dK and dV, then dQ, or all three gradients at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from flashbench.errors import UsageError, nearest
from flashbench.kernels.blocks import BlockShape, compiled_figures, default_blocks, family, padded
from flashbench.kernels.flash_v2_delta import ROW_PADDING
from flashbench.kernels.flash_v2_launches import KernelLaunch, Streams, keys_launch, queries_launch, statistics_launch
from flashbench.kernels.inputs import check_inputs, device_limits, on, product_dtype, visibility
from flashbench.kernels.tiles import describable

KEYS, QUERIES, ONE_PASS = "flash-v2 backward keys", "flash-v2 backward queries", "flash-v2 backward one-pass"
KERNELS = {"two-pass": (KEYS, QUERIES), "one-pass": (ONE_PASS,)}
"""Backward variants, and the kernels of each by their names in the table of block shapes; the first holds keys, the second queries."""


class Backward(NamedTuple):
    """A backward pass, ready to run: `run(backward)` makes its launches in turn and fills dq, dk and dv."""

    statistics: KernelLaunch
    passes: tuple[KernelLaunch, ...]
    """One for each kernel of the variant, in the order of KERNELS."""
    blocks: tuple[BlockShape, ...]
    """Of the passes."""
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dq_sums: torch.Tensor | None
    """Where one pass adds dQ up, fp32; dq itself if that is fp32 too."""
    scale: float


def keys_shared_bytes(
    blocks: BlockShape, capability: tuple[int, int] | None, dtype: str, head_dim: int, head_dim_v: int
) -> int:
    """What `flash_v2_keys_kernel` needs, from above: a K and a V tile, and Q, dO, lse and delta for each stage."""
    d, dv = padded(head_dim), padded(head_dim_v)
    size = 4 if dtype in ("fp32", "tf32") else 2
    stages = max(2, blocks.num_stages)  # without a pipeline too tiles are copied, and transposed for products of tf32
    if family(capability) == "sm_100":
        stages += 3 if dtype == "tf32" else 2  # this matrix unit takes no operand from registers
    elements = (blocks.block_kv + stages * blocks.block_q) * (d + dv)
    statistics, barriers = 2 * 4 * stages * blocks.block_q, 4096
    return elements * size + statistics + barriers


def one_pass_shared_bytes(
    blocks: BlockShape, capability: tuple[int, int] | None, dtype: str, head_dim: int, head_dim_v: int
) -> int:
    """The same with dQ: dS passes through shared memory to be transposed, and the tile of dQ on its way out."""
    size = 4 if dtype in ("fp32", "tf32") else 2
    d_s, d_q = size * blocks.block_q * blocks.block_kv, 4 * blocks.block_q * padded(head_dim)
    return keys_shared_bytes(blocks, capability, dtype, head_dim, head_dim_v) + d_s + d_q


def queries_shared_bytes(
    blocks: BlockShape, capability: tuple[int, int] | None, dtype: str, head_dim: int, head_dim_v: int
) -> int:
    """What `flash_v2_queries_kernel` needs, from above: a Q and a dO tile, and a K and a V tile for each stage."""
    return keys_shared_bytes(
        replace(blocks, block_q=blocks.block_kv, block_kv=blocks.block_q), capability, dtype, head_dim, head_dim_v
    )


SHARED_BYTES: dict[str, Callable[[BlockShape, tuple[int, int] | None, str, int, int], int]] = {
    KEYS: keys_shared_bytes,
    QUERIES: queries_shared_bytes,
    ONE_PASS: one_pass_shared_bytes,
}
"""By kernel: shared memory of one program, from above."""


def check_backward(q: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, d_out: torch.Tensor) -> None:
    """UsageError unless out, lse and d_out are what a forward pass of q and v gives and gets back."""
    rows = tuple(q.shape[:3])
    for name, tensor, shape, dtype in (
        ("out", out, (*rows, v.shape[3]), q.dtype),
        ("d_out", d_out, (*rows, v.shape[3]), q.dtype),
        ("lse", lse, rows, torch.float32),
    ):
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != q.device:
            raise UsageError(
                f"{name} must be {shape}, {dtype}, on {q.device}; it is {tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device}"
            )


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_out: torch.Tensor,
    *,
    mask: str = "none",
    scale: float | None = None,
    precision: str = "ieee",
    variant: str = "two-pass",
    blocks: tuple[BlockShape, ...] | None = None,
) -> Backward:
    """The launches for `flash_v2_backward` with the same arguments; allocates its outputs, launches nothing."""
    check_inputs(q, k, v, precision)
    check_backward(q, v, out, lse, d_out)
    if variant not in KERNELS:
        raise UsageError(f"unknown backward '{variant}'{nearest(variant, KERNELS)} (known: {', '.join(KERNELS)})")
    causal, window = visibility(mask, k.shape[2])
    scale = q.shape[3] ** -0.5 if scale is None else scale
    limits = device_limits(q.device)
    readable = all(map(describable, (q, k, v, d_out)))
    if blocks is None:
        dtype = product_dtype(q, precision)
        blocks = tuple(
            default_blocks(
                limits.capability, dtype, q.shape[3], v.shape[3], limits.shared_bytes,
                descriptors=readable, kernel=kernel, need=SHARED_BYTES[kernel],
            )
            for kernel in KERNELS[variant]
        )  # fmt: skip
    elif not readable:
        blocks = tuple(replace(shape, descriptors=False) for shape in blocks)
    if max(shape.block_q for shape in blocks) > ROW_PADDING:
        raise UsageError(
            f"a block of {max(shape.block_q for shape in blocks)} queries is above {ROW_PADDING}, the most here"
        )

    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    sums = None
    if variant == "one-pass":
        sums = dq if dq.dtype == torch.float32 else torch.empty(q.shape, dtype=torch.float32, device=q.device)
    statistics = statistics_launch(out, d_out, lse)
    lse_bits, delta = statistics.arguments[3:5]
    streams = Streams(q, k, v, d_out, lse_bits, delta, causal, window, scale, precision, limits)
    passes: tuple[KernelLaunch, ...] = (keys_launch(streams, dk, dv, sums, blocks[0]),)
    if variant == "two-pass":
        passes = (*passes, queries_launch(streams, dq, blocks[1]))
    return Backward(statistics, passes, blocks, dq, dk, dv, sums, scale)


def run(backward: Backward) -> list[Any]:
    """Make the launches, on their tensors' device; gives Triton's compiled kernels of the passes, or None for each if interpreted."""
    with on(backward.dq.device):
        if backward.dq_sums is not None:
            backward.dq_sums.zero_()
        compiled = [
            launch.kernel[launch.grid](*launch.arguments, **launch.constants)
            for launch in (backward.statistics, *backward.passes)
        ]
        if backward.dq_sums is not None:
            torch.mul(backward.dq_sums, backward.scale, out=backward.dq)
    return compiled[1:]


def flash_v2_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    d_out: torch.Tensor,
    *,
    mask: str = "none",
    scale: float | None = None,
    precision: str = "ieee",
    variant: str = "two-pass",
    blocks: tuple[BlockShape, ...] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dQ, dK and dV, contiguous and in the dtype of q, k and v, for the gradient `d_out` of `out`.

    q, k, v, mask, scale and precision as `flash_v2_forward` was given them; out (B, Hq, Sq, Dv) and lse (B, Hq, Sq, fp32, natural) as it
    returned them with `with_lse`. All may have any strides. A query that sees no key has gradient 0. `variant`: `two-pass` gives the same
    bits at every call, `one-pass` adds dQ up in whatever order its programs come. `blocks` are those of the variant's kernels, two or
    one. Raises UsageError for tensors that do not fit together and for a variant that does not exist.
    """
    backward = prepare(
        q, k, v, out, lse, d_out, mask=mask, scale=scale, precision=precision, variant=variant, blocks=blocks
    )
    run(backward)
    return backward.dq, backward.dk, backward.dv


def launch_figures(backward: Backward) -> dict[str, Any]:
    """What a row's `launch` says of a backward pass; runs it once.

    `block_kv` keys are held by a program that makes dK and dV, and `block_q` queries by one that makes dQ, or passed over by it where it
    makes all three; below, by pass, the whole shape, registers, spills and shared memory.
    """
    figures = [compiled_figures(shape, done) for shape, done in zip(backward.blocks, run(backward), strict=True)]
    names = ("keys", "queries") if len(figures) == 2 else ("one_pass",)
    return {
        "block_q": backward.blocks[-1].block_q,
        "block_kv": backward.blocks[0].block_kv,
        **dict(zip(names, figures, strict=True)),
    }
