"""The Gluon calls of flash-v3 under one name each: Triton renames them from version to version, and here is where that ends.

Asked by `hasattr`, never by version. Importing this module needs a Triton with Gluon (3.6 or later); `missing()` says in words what another lacks.
"""

from __future__ import annotations

from typing import Any

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "TensorDescriptor",
    "add_tile",
    "fence_async_shared",
    "gl",
    "gluon",
    "load_tile",
    "mbarrier",
    "missing",
    "partition_barrier",
    "product_under_way",
    "store_tile",
    "store_wait",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

mbarrier = hopper.mbarrier
fence_async_shared = hopper.fence_async_shared
warpgroup_mma = hopper.warpgroup_mma
warpgroup_mma_wait = hopper.warpgroup_mma_wait
store_wait = hopper.tma.store_wait
product_under_way = hopper.warpgroup_mma_init
"""An accumulator that a loop may carry while a product with it is under way."""


def _first(module: Any, *names: str) -> Any:
    """The first of `names` that the module has; None where it has none, so that importing never fails half-way."""
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


# Newest name first: where both exist, the old one only raises (Triton 3.9).
load_tile = _first(hopper.tma, "async_load", "async_copy_global_to_shared")
store_tile = _first(hopper.tma, "async_store", "async_copy_shared_to_global")
partition_barrier = _first(gl, "barrier", "thread_barrier")


@gl._core.builtin
def _reduce_add(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
    """What Triton 3.6 can compile and has no call for: the copy engine adds a tile of shared memory to global memory."""
    corner = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, corner, src.handle)


add_tile = _first(hopper.tma, "async_atomic_add") or _reduce_add


def missing() -> str | None:
    """The calls that this Triton has under no name known here, in words, or None."""
    named = {"TMA load": load_tile, "TMA store": store_tile, "barrier": partition_barrier}
    absent = [name for name, call in named.items() if call is None]
    return f"this Triton's Gluon has no {', '.join(absent)} under a name that flash-v3 knows" if absent else None
