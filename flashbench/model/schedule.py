"""How an implementation goes about its work: what the byte, FLOP and memory models need to know of it beyond its algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flashbench.errors import UsageError, nearest

MAX_THREADS_PER_SM = 1536
"""The least of any GPU from sm_80 on (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")."""
REGISTERS_PER_SM = 65536
RESERVED_BYTES = 1024
"""Shared memory that CUDA keeps for itself with each thread block."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Kernels of their own over the scores: (matrices read, matrices written) in either direction."""

    forward: tuple[float, float]
    backward: tuple[float, float]
    masked: bool = False
    """Made only where the problem has a mask."""


PASSES = {
    "scale": Pass((1, 1), (1, 1)),
    "mask_fill": Pass((1, 1), (1, 1), masked=True),
    "mask_add": Pass((1, 1), (0, 0), masked=True),
    "dropout": Pass((1, 1), (1, 1)),
    # PyTorch's softmax backward on CUDA first stores the product of dP and P (softmax_backward_cuda_out in SoftMax.cu): one more
    # matrix written, and it and P read again. Its CPU kernel does not; what is predicted for a CPU is a matrix too much.
    "grad_product": Pass((0, 0), (2, 1)),
    # PyTorch's math backend (_safe_softmax in attention.cpp): which weights come of a score of -inf (a truth value each), whether all of
    # a row do (those read), and weights or zeros written again.
    "safe_softmax": Pass((2.25, 1.25), (0, 0)),
    # It returns the weights in the dtype of the inputs, too: half as wide as the fp32 that it works in.
    "returned_weights": Pass((1, 0.5), (0, 0)),
    # Scores filled in place through a view: PyTorch's AsStridedBackward writes zeros and copies the gradient over them, CopySlices
    # (autograd/functions/tensor.cpp) copies it, clones it, and copies the result back, and masked_fill clones once more: five
    # copies and the zeros, beside the fill itself.
    "view_copies": Pass((0, 0), (5, 6), masked=True),
}
"""What a materialised form may run beside its products and its softmax. Dropout also moves a mask of its own, a byte an element."""

SCALABLE = ("q", "k")
COPIED_BACKWARD = ("o", "d_o")
SIZES = ("block_q", "block_kv", "blocks_per_sm", "backward_blocks_per_sm", "dq_blocks_per_sm", "accumulator_bytes")


@dataclass(frozen=True, slots=True)
class Schedule:
    """Block shape and habits of an implementation. The defaults are those of a plain FlashAttention-2 kernel.

    >>> Schedule(block_q=128, block_kv=64)                  # a tiled kernel
    >>> Schedule(passes=("scale", "mask_fill"))             # plain attention that scales and masks in passes of their own
    >>> Schedule(scaled_copies=("q",))                      # plain attention that scales its queries
    """

    block_q: int = 128
    block_kv: int = 128
    blocks_per_sm: int = 1
    """Thread blocks that an SM runs at a time, forward."""
    backward_blocks_per_sm: int = 1
    """The same of the kernel that makes dK and dV, and dQ too unless it has a pass of its own."""
    dq_blocks_per_sm: int = 1
    """The same of that pass."""
    longest_first: bool = False
    """Whether causal blocks of queries start in falling order of their length, over all heads whose keys and values fill a third of
    the L2 together."""
    walks_down: bool = False
    """Whether a block of queries goes over its keys from the last that it sees to the first, forward and under a mask."""
    accumulator_bytes: int = 4
    """Bytes of an element of what is accumulated in memory: O in the first FlashAttention's loop, dQ in backward."""
    two_pass_backward: bool = False
    """dQ in a pass of its own, without an accumulator: seven products in place of five."""
    writes_lse: bool = True
    """Whether a tiled forward pass writes its row statistics (fp32, one a query)."""
    expands_kv: bool = False
    """Whether K and V are first repeated to the number of query heads."""
    transposes_v: bool = False
    """Whether V in fp8 is first written again along its keys, as Hopper's matrix unit reads 8-bit numbers."""
    passes: tuple[str, ...] = ()
    """Extra passes over the scores, of PASSES."""
    scaled_copies: tuple[str, ...] = ()
    """Inputs, q or k, that plain attention first writes again, multiplied by the scale (or its root)."""
    backward_copies: tuple[str, ...] = ()
    """Tensors, o or d_o, that backward first writes again, because it wants another layout than autograd hands over."""
    stored_blocks: bool = False
    """Whether the scores of a block, over all heads, are tensors in memory, as in a loop of library calls."""
    score_bytes: int | None = None
    """Bytes of a stored score; by default those of the problem's dtype, and 2 for fp8."""

    def __post_init__(self) -> None:
        for name in SIZES:
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in self.passes:
            if name not in PASSES:
                raise UsageError(f"unknown pass '{name}'{nearest(name, PASSES)} (known: {', '.join(PASSES)})")
        for name in self.backward_copies:
            if name not in COPIED_BACKWARD:
                raise UsageError(f"'{name}' is not copied by a backward pass (known: {', '.join(COPIED_BACKWARD)})")
        for name in self.scaled_copies:
            if name not in SCALABLE:
                raise UsageError(f"'{name}' is no input that carries the scale (known: {', '.join(SCALABLE)})")


def programs_per_sm(shared_bytes: int, shared_limit_bytes: int, num_warps: int, registers: int = 168) -> int:
    """Thread blocks that an SM holds at a time, at least 1: by shared memory (`shared_limit_bytes` is the most of one block), threads
    and registers (of a thread, from above)."""
    by_shared = (shared_limit_bytes + RESERVED_BYTES) // (shared_bytes + RESERVED_BYTES)
    by_registers = REGISTERS_PER_SM // (registers * 32 * num_warps)
    return max(1, min(by_shared, by_registers, MAX_THREADS_PER_SM // (32 * num_warps)))


def as_launched(schedule: Schedule, launch: Mapping[str, Any] | None, shared_limit_bytes: int | None) -> Schedule:
    """The schedule with what a row's `launch` tells: block shape, which way blocks walk, and how many blocks of each kernel fit an SM."""
    told = launch or {}
    if not all(isinstance(told.get(name), int) for name in ("block_q", "block_kv")):
        return schedule
    keys, queries = told.get("keys") or told.get("one_pass"), told.get("queries")
    return replace(
        schedule,
        block_q=told["block_q"],
        block_kv=told["block_kv"],
        blocks_per_sm=_fitting(told, shared_limit_bytes) or schedule.blocks_per_sm,
        backward_blocks_per_sm=_fitting(keys, shared_limit_bytes) or schedule.backward_blocks_per_sm,
        dq_blocks_per_sm=_fitting(queries, shared_limit_bytes) or schedule.dq_blocks_per_sm,
        walks_down=bool(told.get("walks_down", schedule.walks_down)),
    )


def _fitting(figures: object, shared_limit_bytes: int | None) -> int | None:
    """Thread blocks of a kernel on an SM, from what a launch says of it; None where that is not known."""
    if not (shared_limit_bytes and isinstance(figures, Mapping)):
        return None
    shared_bytes, num_warps, registers = (figures.get(name) for name in ("shared_bytes", "num_warps", "registers"))
    if not (isinstance(shared_bytes, int) and isinstance(num_warps, int) and isinstance(registers, int)):
        return None
    return programs_per_sm(shared_bytes, shared_limit_bytes, num_warps, max(1, registers))
