"""Block shapes of the kernels: those worth trying per GPU family (`block_shapes.yaml`), and the first of them that fits the device.

A block shape trades three things. Taller query blocks re-read K and V less often. More key columns, stages and warps keep the matrix
units fed. All of them take registers and shared memory, of which a multiprocessor has 65,536 and 100 to 227 KiB: a shape that spills
registers, or that leaves room for one program where two would hide each other's softmax, loses more than it wins.
"""

from __future__ import annotations

import functools
import importlib.resources
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from flashbench.errors import UsageError, nearest

FORWARD = "flash-v2 forward"
SHORT_KEYS = 512
"""Keys that a query of a causal sequence of 1,024 sees on average."""
USES = ("dense", "short", "long")
"""What a shape of the forward pass may be kept for."""


def use_of(masked: bool, mean_keys: float, row_bytes: int, l2_bytes: int) -> str:
    """Which of USES a problem is, or none, whose queries see `mean_keys` on average, `row_bytes` being those of a key and its value.

    `long`: what a query sees takes more than half of the L2, masked or not; else `dense`: there is no mask; or `short`: there is one, and
    queries see SHORT_KEYS at most.
    """
    if mean_keys * row_bytes > l2_bytes / 2:
        return "long"
    if not masked:
        return "dense"
    return "short" if mean_keys <= SHORT_KEYS else ""


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
    use: str = ""
    """What it is kept for in the forward pass, of USES; or anything."""

    def row(self) -> str:
        """As the table writes it: `128x64 w4 s3 tma`, or with its use behind it."""
        words = f"{' tma' if self.descriptors else ''}{' ' if self.use else ''}{self.use}"
        return f"{self.block_q}x{self.block_kv} w{self.num_warps} s{self.num_stages}{words}"


def parse_shape(row: str) -> BlockShape:
    """A row of the table, `128x64 w4 s3 tma dense`: queries x keys, warps, stages, whether to load through descriptors, and its use."""
    found = re.fullmatch(rf"(\d+)x(\d+) w(\d+) s(\d+)( tma)?(?: ({'|'.join(USES)}))?", row)
    if not found:
        raise UsageError(
            f"'{row}' is no block shape; one is written as 128x64 w4 s3, with tma and one of {', '.join(USES)} behind it or without"
        )
    block_q, block_kv, warps, stages = map(int, found.groups()[:4])
    return BlockShape(block_q, block_kv, warps, stages, found[5] is not None, found[6] or "")


Rows = dict[int, tuple[BlockShape, ...]]
"""Padded head dimension to shapes, best first."""


def table_text() -> str:
    """The table as it lies in the package."""
    return importlib.resources.files("flashbench.kernels").joinpath("block_shapes.yaml").read_text(encoding="utf-8")


Table = dict[str, dict[str, dict[str, Rows]]]
"""Kernel, family, kind of product, padded head dimension -> shapes."""


@functools.cache
def block_table() -> Table:
    """The package's `block_shapes.yaml`."""
    return read_table(table_text())


def read_table(text: str) -> Table:
    """A table of block shapes from its YAML text; UsageError for a row that is no shape."""
    from ruamel.yaml import YAML

    return {
        kernel: {
            place: {
                kind: {width: tuple(map(parse_shape, rows)) for width, rows in widths.items()}
                for kind, widths in kinds.items()
            }
            for place, kinds in (families or {}).items()
        }
        for kernel, families in YAML(typ="safe").load(text).items()
    }


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


def kind_of(dtype: str) -> str:
    """Which rows a dtype (bf16, fp16, fp32, tf32) reads: half, tf32, or ieee for exact fp32."""
    return {"fp32": "ieee", "tf32": "tf32"}.get(dtype, "half")


def address(
    capability: tuple[int, int] | None, dtype: str, head_dim: int, kernel: str = FORWARD
) -> tuple[str, str, int]:
    """Where a kernel's shapes stand in the table: family, kind and width. UsageError, naming the three, where it has none."""
    if kernel not in block_table():
        raise UsageError(
            f"no block shapes for kernel '{kernel}'{nearest(kernel, block_table())} (known: {', '.join(block_table())})"
        )
    families, name, kind = block_table()[kernel], family(capability), kind_of(dtype)
    # The narrowest tile that is wide enough, whosever rows it is; of two, the more particular.
    found = [
        (width, i, (place, product))
        for i, (place, product) in enumerate(((name, kind), (name, "any"), ("any", kind), ("any", "any")))
        for width in families.get(place, {}).get(product, {})
        if width >= padded(head_dim)
    ]
    if found:
        width, _, (place, product) = min(found)
        return place, product, width
    raise UsageError(
        f"no block shapes of '{kernel}' for {name}, {kind}, head_dim {head_dim} in block_shapes.yaml; "
        "pass `blocks`, or add rows there and let `flashbench tune` order them"
    )


def candidate_blocks(
    capability: tuple[int, int] | None, dtype: str, head_dim: int, kernel: str = FORWARD
) -> tuple[BlockShape, ...]:
    """The shapes of the table for a dtype (bf16, fp16, fp32, tf32) and head dimension, best first; UsageError where it has none."""
    place, kind, width = address(capability, dtype, head_dim, kernel)
    return block_table()[kernel][place][kind][width]


Need = Callable[[BlockShape, "tuple[int, int] | None", str, int, int], int]
"""Shared memory of one program, from above, in bytes, for (blocks, capability, dtype, head_dim, head_dim_v): a kernel's `shared_bytes`."""


def shared_bytes(
    blocks: BlockShape, capability: tuple[int, int] | None, dtype: str, head_dim: int, head_dim_v: int
) -> int:
    """What the forward kernel needs: the query tile, and a K and a V tile for each stage. Triton may alias some of it."""
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
    use: str = "",
    kernel: str = FORWARD,
    need: Need = shared_bytes,
) -> BlockShape:
    """The first shape of the table that fits `shared_limit_bytes`, or the one that needs least if none is sure to.

    `descriptors` says whether the tensors can be read through them; shapes kept for the problem's `use` come first, and those kept for another
    are left out; `need` is the kernel's own estimate. Ampere has no descriptors, and leaves out shapes of `any` family that use them.
    UsageError where the table has no shape for this kernel that can be used.
    """
    rows = candidate_blocks(capability, dtype, max(head_dim, head_dim_v), kernel)
    descriptors = descriptors and family(capability) != "sm_80"
    usable = [shape for shape in rows if shape.descriptors <= descriptors and shape.use in ("", use)]
    usable.sort(key=lambda shape: shape.use == "")
    if not usable:
        raise UsageError(
            f"all block shapes of '{kernel}' for {family(capability)}, {dtype}, head_dim {max(head_dim, head_dim_v)} load through "
            "descriptors, which these tensors or this GPU do not allow; add a shape without tma to block_shapes.yaml"
        )

    def bytes_of(shape: BlockShape) -> int:
        return need(shape, capability, dtype, head_dim, head_dim_v)

    return next((shape for shape in usable if bytes_of(shape) <= shared_limit_bytes), min(usable, key=bytes_of))


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
