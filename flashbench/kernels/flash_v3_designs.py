"""What can be chosen about flash-v3, and which choice goes with which problem: tiles, the ideas as switches, and the variants of the ladder."""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass, replace
from typing import Any

from flashbench.errors import UsageError, nearest
from flashbench.kernels.blocks import padded
from flashbench.kernels.flash_v3_schedule import ROWS
from flashbench.kernels.schedule import mean_keys

REGISTERS = {2: (240, 24), 3: (160, 32)}
"""Registers of a consumer's and of a producer's thread by the number of consumers: 65,536 a multiprocessor, over 128 threads for each."""
SHARED_BYTES = 227 * 1024
"""Most shared memory of one program on sm_90 (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")."""


@dataclass(frozen=True, slots=True)
class Design:
    """One way to build the kernel: its tiles, and each idea of the way from v2 to v3 as a switch."""

    consumers: int = 2
    """Warpgroups that compute, of 64 queries each: 2 or 3."""
    block_kv: int = 128
    stages: int = 2
    """K and V tiles in flight or in use."""
    overlap: bool = True
    """The next block's scores are under way during this block's softmax, inside one warpgroup (FlashAttention-3, section 3.2)."""
    persistent: bool = True
    """One program a multiprocessor, which goes on to the next tile, and loads it while the last one ends."""
    longest_first: bool = True
    """Causal: tiles with the most keys come first."""
    pingpong: bool = False
    """Warpgroups take turns at the matrix unit, so that one's softmax runs beside the other's products (the paper's section 3.1)."""
    lazy_rescale: bool = True
    """The running maximum follows the scores only when they pass it by 8 bits (e4m3: 1.75), and a warp none of whose rows did so does not rescale its output
    (FlashAttention-4)."""
    early_wait: bool = True
    """The product with V is waited for once the row maxima are known, not after the softmax: what follows it, conversions of the weights and the
    rescaling of the output, then runs beside exponentials. FlashAttention-3's machine code has it so, by its compiler's choice."""
    carry: bool = True
    """The first scores of a tile are under way while the one before it ends, where a second place for Q fits."""
    queue: bool = True
    """Persistent: a program draws its next tile when it is about to need it, rather than that all are dealt out beforehand."""
    named_release: bool = False
    """Consumers give K and V tiles back through named barriers, without first meeting among themselves."""

    @property
    def block_q(self) -> int:
        return self.consumers * int(ROWS)

    @property
    def num_warps(self) -> int:
        """Of a program, the producer's included; registers are set for whole warpgroups, so that it takes four, three of them idle."""
        return 4 * self.consumers + 4

    def row(self) -> str:
        """The tiles in short, such as `128x128 s2`."""
        return f"{self.block_q}x{self.block_kv} s{self.stages}"


# By the larger padded head dimension: as many keys as registers hold scores for (block_kv + head_dim_v <= 320 a row, <= 192 where three
# consumers share them), then as many stages as fit. What else is switched on where is measured: docs/flash-v3.md.
DESIGNS = {
    64: Design(consumers=3, stages=3),
    128: Design(pingpong=True),
    256: Design(block_kv=64, pingpong=True, named_release=True),
}
SHORT_KEYS = 1024
"""A tile whose queries see no more keys than this, on average, is short: how it begins and ends counts."""
CHOICES: dict[tuple[int, str, str], dict[str, Any]] = {
    (64, "none", "short"): {"early_wait": False, "lazy_rescale": False},
    # Of blocks of 192 queries too many would be at the diagonal.
    (64, "causal", "short"): {"consumers": 2, "lazy_rescale": False},
    (64, "none", "long"): {"carry": False, "pingpong": True},
    (64, "causal", "long"): {"carry": False, "pingpong": True},
    (128, "none", "long"): {"carry": False},
    (128, "causal", "long"): {"carry": False},
}
"""What is otherwise, by head dimension, mask (windows go with causal) and length of the tiles."""
RUNGS: dict[str, dict[str, Any]] = {
    "bare": {
        "overlap": False, "persistent": False, "longest_first": False, "queue": False, "early_wait": False, "lazy_rescale": False,
        "carry": False, "pingpong": False, "named_release": False,
    },
    "overlap": {"overlap": True},
    "persistent": {"persistent": True},
    "dealt": {"longest_first": True},
    "queue": {"queue": True},
    "early-wait": {"early_wait": True},
}  # fmt: skip
"""The ladder from flash-v2 to flash-v3: what each rung adds to those before it. At head dimension 128, where tiles are long, flash-v3 adds the
lazy rescaling and turns."""
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    **dict(zip(RUNGS, itertools.accumulate(RUNGS.values(), operator.or_), strict=True)),
    # Steps aside, each with one thing other than in flash-v3.
    "one-tile": {"persistent": False},
    "no-overlap": {"overlap": False},
    "no-pingpong": {"pingpong": False},
    "named-release": {"named_release": True},
    "two-consumers": {"consumers": 2},
}
"""Fields of the head dimension's design that a variant sets."""


def design_for(
    head_dim: int,
    head_dim_v: int,
    variant: str = "",
    *,
    seq_q: int,
    seq_kv: int,
    causal: bool,
    window: int | None = None,
) -> Design:
    """The design of a variant for a problem, whose windows are causal too.

    UsageError for a variant that is not known or does not fit the registers.
    """
    if variant not in VARIANTS:
        known = ", ".join(filter(None, VARIANTS))
        raise UsageError(f"unknown variant '{variant}' of flash-v3{nearest(variant, VARIANTS)} (known: {known})")
    widest = max(box(head_dim), box(head_dim_v))
    length = "short" if mean_keys(seq_q, seq_kv, window, causal=causal) <= SHORT_KEYS else "long"
    choices = CHOICES.get((widest, "causal" if causal else "none", length), {})
    design = replace(DESIGNS[widest], **{**choices, **VARIANTS[variant]})
    if design.consumers == 3 and widest > 64:
        raise UsageError(f"three consumers have registers for a head_dim up to 64, not {max(head_dim, head_dim_v)}")
    return design


def box(head_dim: int) -> int:
    """The head dimension as a tile holds it: 64, 128 or 256. What is beyond the tensor the copy engine reads as 0, and does not write."""
    return max(64, padded(head_dim))


def tile_bytes(
    design: Design, head_dim: int, head_dim_v: int, *, out_tiles: bool, q_places: int = 1, element_bytes: int = 2
) -> int:
    """Shared memory of one program, from above: Q of all consumers, K and V of each stage, the output's tiles if they have their own place.

    Elements of Q, K and V have `element_bytes`, those of the output 2.
    """
    d, dv = box(head_dim), box(head_dim_v)
    elements = q_places * design.block_q * d + design.stages * design.block_kv * (d + dv)
    barriers = 1024
    return element_bytes * elements + 2 * out_tiles * design.block_q * dv + barriers


def carries(design: Design, head_dim: int, head_dim_v: int, *, causal: bool, element_bytes: int = 2) -> bool:
    """Whether a launch can begin a tile while the last one ends: if asked for, if Q and the output have the room, and if a consumer that lets
    blocks go by can do so without the stage that its last product still needs."""
    let_by = -(-(design.block_q - int(ROWS)) // design.block_kv) if causal else 0
    needed = tile_bytes(design, head_dim, head_dim_v, out_tiles=True, q_places=2, element_bytes=element_bytes)
    fits = needed <= SHARED_BYTES
    return design.carry and design.overlap and design.persistent and fits and let_by < design.stages
