"""Block shapes of the forward kernel: a table of those worth trying per GPU family, and the first of them that fits the device.

A block shape trades three things. Taller query blocks re-read K and V less often. More key columns, stages and warps keep the matrix
units fed. All of them take registers and shared memory, of which a multiprocessor has 65,536 and 100 to 227 KiB: a shape that spills
registers, or that leaves room for one program where two would hide each other's softmax, loses more than it wins.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from typing import Any

from flashbench.errors import UsageError


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Queries and keys per tile, and how Triton is to compile the kernel for them."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int
    """Depth of the software pipeline: K and V tiles in flight."""
    descriptors: bool = False
    """Load through tensor descriptors (TMA) where the tensors allow it; sm_90 and later."""


def _shapes(*rows: str) -> tuple[BlockShape, ...]:
    """Rows such as `128x64 w4 s3 tma`: queries x keys, warps, stages, and whether to load through descriptors."""
    shapes = []
    for row in rows:
        tile, warps, stages, *switches = row.split()
        block_q, block_kv = map(int, tile.split("x"))
        shapes.append(BlockShape(block_q, block_kv, int(warps[1:]), int(stages[1:]), "tma" in switches))
    return tuple(shapes)


# Per GPU family and kind of product: padded head dimension -> shapes, best first. The first that fits and can be used is the default,
# the others are candidates for tuning and what is left when shared memory is short. Pointer loads keep addresses in registers, so the
# best tile for them is often smaller. The sm_90 rows for half precision stand in the order measured on an H200, at head dimensions 64,
# 128 and 256, 4k and 16k, dense and causal; the others were compiled for their chip and never timed on one. Triton 3.6 can specialise
# warps of this kernel on sm_90 (tl.range(warp_specialize=True)); what it compiled hung on an H200, so that is not offered.
_HALF, _TF32, _IEEE = "half", "tf32", "ieee"
_TABLE: dict[tuple[str, str], dict[int, tuple[BlockShape, ...]]] = {
    ("sm_80", _HALF): {
        32: _shapes("128x128 w8 s3", "128x64 w4 s3", "64x64 w4 s3"),
        64: _shapes("128x64 w8 s3", "128x64 w4 s3", "128x128 w8 s2", "64x64 w4 s3"),
        128: _shapes("128x32 w8 s3", "64x64 w4 s3", "128x64 w8 s3", "64x64 w4 s2", "64x32 w4 s2"),
        256: _shapes("64x32 w8 s2", "64x64 w8 s2", "128x32 w8 s2", "32x32 w4 s2"),
    },
    ("sm_90", _HALF): {
        32: _shapes("128x128 w8 s3 tma", "128x64 w4 s3 tma", "128x128 w8 s2"),
        64: _shapes(
            "64x128 w4 s2 tma", "64x128 w4 s3 tma", "64x64 w4 s3 tma", "128x64 w4 s4 tma", "128x64 w4 s3 tma",
            "128x64 w8 s3", "128x128 w8 s2", "64x64 w4 s2",
        ),
        128: _shapes(
            "128x64 w4 s2 tma", "128x128 w8 s3 tma", "128x64 w8 s3 tma", "128x128 w8 s2 tma", "64x64 w4 s2 tma",
            "128x64 w8 s3", "128x128 w8 s2", "128x64 w8 s2",
        ),
        256: _shapes(
            "64x64 w4 s3 tma", "128x64 w8 s2 tma", "128x32 w8 s3 tma", "64x64 w4 s2 tma", "128x64 w8 s2", "128x32 w8 s2", "64x64 w8 s2",
        ),
    },
    ("sm_100", _HALF): {
        32: _shapes("128x64 w4 s3 tma", "128x128 w8 s3 tma", "128x64 w8 s2"),
        64: _shapes("128x128 w8 s3 tma", "128x64 w4 s3 tma", "128x64 w8 s2"),
        128: _shapes("128x128 w8 s2 tma", "128x64 w4 s3 tma", "128x64 w8 s3"),
        256: _shapes("128x64 w8 s2 tma", "128x32 w8 s2 tma", "128x32 w8 s2"),
    },
    ("sm_80", _TF32): {
        64: _shapes("64x64 w8 s2", "128x64 w8 s2", "64x64 w4 s2"),
        128: _shapes("64x64 w8 s2", "64x32 w8 s2", "32x32 w4 s2"),
        256: _shapes("64x32 w8 s2", "64x16 w8 s2", "32x16 w8 s2"),
    },
    ("sm_90", _TF32): {
        64: _shapes("128x64 w8 s2 tma", "64x64 w4 s2 tma", "128x64 w8 s2"),
        128: _shapes("128x64 w8 s2 tma", "128x32 w8 s2 tma", "64x64 w4 s2 tma", "64x32 w8 s2"),
        256: _shapes("64x32 w8 s2 tma", "128x16 w8 s2 tma", "64x16 w8 s2"),
    },
    ("sm_100", _TF32): {
        64: _shapes("128x64 w8 s2 tma", "64x64 w4 s2 tma", "64x64 w8 s2"),
        128: _shapes("128x32 w8 s2 tma", "64x32 w8 s2 tma", "64x32 w8 s2"),
        256: _shapes("64x16 w8 s2 tma", "32x16 w8 s2"),
    },
    # Exact fp32 products run on the ordinary units, with operands in registers: small tiles, on every family alike.
    ("any", _IEEE): {
        64: _shapes("64x32 w8 s2", "32x32 w8 s2"),
        128: _shapes("32x32 w8 s2", "32x16 w8 s2"),
        256: _shapes("32x16 w8 s2", "16x16 w8 s2"),
    },
    # The interpreter runs a program at a time in NumPy: few, large tiles are quickest.
    ("interpreter", "any"): {256: _shapes("64x64 w4 s1 tma", "64x64 w4 s1")},
}  # fmt: skip


def padded(head_dim: int) -> int:
    """The head dimension as a tile holds it: a power of two, at least 16 (the least that a matrix product takes)."""
    return max(16, 1 << (head_dim - 1).bit_length())


def family(capability: tuple[int, int] | None) -> str:
    """Which rows of the table a compute capability reads; None is the interpreter. Consumer Blackwell (12.x) is fed as Ampere is."""
    if capability is None:
        return "interpreter"
    if capability[0] in (9, 10):
        return f"sm_{capability[0]}0"
    if capability[0] == 11:
        return "sm_100"
    if capability[0] == 8 or capability[0] > 11:
        return "sm_80"
    raise UsageError(
        f"no block shapes for compute capability {capability[0]}.{capability[1]}; the kernels need 8.0 or later"
    )


def candidate_blocks(capability: tuple[int, int] | None, dtype: str, head_dim: int) -> tuple[BlockShape, ...]:
    """The shapes of the table for a dtype (bf16, fp16, fp32, tf32) and head dimension, best first."""
    name = family(capability)
    kind = {"fp32": _IEEE, "tf32": _TF32}.get(dtype, _HALF)
    if name == "interpreter":
        kind = "any"
    elif kind == _IEEE:
        name = "any"
    rows = _TABLE[name, kind]
    return rows[min(width for width in rows if width >= padded(head_dim))]


def shared_bytes(
    blocks: BlockShape, capability: tuple[int, int] | None, dtype: str, head_dim: int, head_dim_v: int
) -> int:
    """Shared memory of one program, from above: the query tile, and a K and a V tile for each stage. Triton may alias some of it."""
    d, dv = padded(head_dim), padded(head_dim_v)
    elements = blocks.block_q * d + blocks.num_stages * blocks.block_kv * (d + dv)
    if dtype == "tf32" and family(capability) == "sm_100":
        # Here the matrix unit takes both operands from shared memory, so that the weights and V, transposed, pass through it too.
        elements += blocks.block_kv * (blocks.block_q + 2 * dv)
    barriers = 2048
    return elements * (4 if dtype in ("fp32", "tf32") else 2) + barriers


@functools.lru_cache(maxsize=1024)
def default_blocks(
    capability: tuple[int, int] | None,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    shared_limit_bytes: int,
    *,
    descriptors: bool = True,
) -> BlockShape:
    """The first shape of the table that fits `shared_limit_bytes`, or the one that needs least if none is sure to.

    `descriptors` says whether the tensors can be read through them.
    """
    usable = [
        shape
        for shape in candidate_blocks(capability, dtype, max(head_dim, head_dim_v))
        if shape.descriptors <= descriptors
    ]

    def need(shape: BlockShape) -> int:
        return shared_bytes(shape, capability, dtype, head_dim, head_dim_v)

    return next((shape for shape in usable if need(shape) <= shared_limit_bytes), min(usable, key=need))


def compiled_figures(blocks: BlockShape, compiled: Any) -> dict[str, Any]:
    """What a row's `launch` says of a kernel: its block shape and, unless it was interpreted (None), what the compiler made of it."""
    figures = asdict(blocks)
    if compiled is not None:
        figures |= {
            "registers": compiled.n_regs,
            "spills": compiled.n_spills,
            "shared_bytes": compiled.metadata.shared,
        }
    return figures
