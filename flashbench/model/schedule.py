"""How an implementation goes about its work: what the byte, FLOP and memory models need to know of it beyond its algorithm."""

from __future__ import annotations

from dataclasses import dataclass

from flashbench.errors import UsageError, nearest

PASSES = ("scale", "mask_fill", "mask_add", "dropout")
"""Kernels of their own that a materialised form may run over the scores."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Block shape and habits of an implementation. The defaults are those of a plain FlashAttention-2 kernel.

    >>> Schedule(block_q=128, block_kv=64)                  # a tiled kernel
    >>> Schedule(passes=("scale", "mask_fill"))             # plain attention that scales and masks in passes of their own
    """

    block_q: int = 128
    block_kv: int = 128
    blocks_per_sm: int = 1
    """Thread blocks that an SM runs at a time."""
    accumulator_bytes: int = 4
    """Bytes of an element of what is accumulated in memory: O in the first FlashAttention's loop, dQ in backward."""
    two_pass_backward: bool = False
    """dQ in a pass of its own, without an accumulator: seven products in place of five."""
    writes_lse: bool = True
    """Whether a tiled forward pass writes its row statistics (fp32, one a query)."""
    expands_kv: bool = False
    """Whether K and V are first repeated to the number of query heads."""
    passes: tuple[str, ...] = ()
    """Extra passes over the scores, of PASSES; those named mask_ are made only where the problem has a mask."""
    score_bytes: int | None = None
    """Bytes of a stored score; by default those of the problem's dtype, and 2 for fp8."""

    def __post_init__(self) -> None:
        for name in ("block_q", "block_kv", "blocks_per_sm", "accumulator_bytes"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in self.passes:
            if name not in PASSES:
                raise UsageError(f"unknown pass '{name}'{nearest(name, PASSES)} (known: {', '.join(PASSES)})")
