"""Kernels whose block shapes `flashbench tune` can measure, by their name in `block_shapes.yaml`; and shapes to try beyond its rows.

To add one: a function that prepares a problem in given blocks, a line in `TUNABLE`, and rows in the table. The parent reads this too, so
torch and triton are imported inside the functions, which the worker alone calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashbench.kernels.blocks import FORWARD, BlockShape, padded, shared_bytes
from flashbench.kernels.splits import decode_shared_bytes
from flashbench.records import Problem

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Trial:
    """A kernel on given tensors in given blocks, ready to be launched again and again."""

    run: Callable[[], Any]
    """One call; gives what Triton compiled, or None from the interpreter."""
    outputs: dict[str, Tensor]
    """What the call fills, by the reference's names: out, dq, dk, dv."""


Bind = Callable[[Problem, BlockShape, "Tensor", "Tensor", "Tensor", "Tensor | None"], Trial]
"""(problem, blocks, q, k, v, grad_out) -> Trial; grad_out in backward only. What precedes the kernel is done here, untimed."""


@dataclass(frozen=True, slots=True)
class Tunable:
    """What tuning needs to know of a kernel."""

    mode: str
    """Of the problems that it is timed on: forward, backward or decode."""
    bind: Bind
    need: Callable[[BlockShape, tuple[int, int] | None, str, int, int], int]
    """The kernel's estimate of a program's shared memory (blocks.Need): a shape that needs more than the device has is not compiled."""
    accumulators: Callable[[BlockShape, int], int]
    """fp32 numbers that a program holds in registers, of a shape and a padded head dimension: bounds the shapes of `grid`."""
    block_q: tuple[int, ...] = (32, 64, 128)
    block_kv: tuple[int, ...] = (32, 64, 128)
    num_stages: tuple[int, ...] = (1, 2, 3, 4)
    descriptors: bool = True


REGISTERS = 160
"""Most accumulators a thread that a generated shape may need; more leaves no room for addresses and operands, and spills."""


def grid(tunable: Tunable, descriptors: bool, head_dim: int) -> Iterator[BlockShape]:
    """Shapes worth a try for a head dimension; `descriptors` says whether the device has them."""
    sides = itertools.product(tunable.block_q, tunable.block_kv, (4, 8), tunable.num_stages)
    for block_q, block_kv, warps, stages in sides:
        for through in (True, False) if descriptors and tunable.descriptors else (False,):
            shape = BlockShape(block_q, block_kv, warps, stages, through)
            enough = block_q * block_kv >= 128 * warps
            if enough and tunable.accumulators(shape, padded(head_dim)) <= REGISTERS * 32 * warps:
                yield shape


def _precision(problem: Problem) -> str:
    return "tf32" if problem.dtype == "tf32" else "ieee"


def _forward(problem: Problem, blocks: BlockShape, q: Tensor, k: Tensor, v: Tensor, _grad_out: Tensor | None) -> Trial:
    from flashbench.kernels import flash_v2

    launch = flash_v2.prepare(q, k, v, mask=problem.mask, precision=_precision(problem), blocks=blocks)
    return Trial(lambda: flash_v2.run(launch), {"out": launch.out})


def _first_version(
    problem: Problem, blocks: BlockShape, q: Tensor, k: Tensor, v: Tensor, _grad_out: Tensor | None
) -> Trial:
    from flashbench.kernels import flash_v1

    launch = flash_v1.prepare(q, k, v, mask=problem.mask, precision=_precision(problem), blocks=blocks)
    return Trial(lambda: flash_v1.run(launch), {"out": launch.out})


def _first_version_need(*shape_and_problem: Any) -> int:
    from flashbench.kernels.flash_v1 import shared_bytes as need

    return need(*shape_and_problem)


def _decode(problem: Problem, blocks: BlockShape, q: Tensor, k: Tensor, v: Tensor, _grad_out: Tensor | None) -> Trial:
    from flashbench.kernels import flash_decode

    launch = flash_decode.prepare(q, k, v, mask=problem.mask, precision=_precision(problem), blocks=blocks)
    return Trial(lambda: flash_decode.run(launch), {"out": launch.out})


def _backward(variant: str, number: int, *outputs: str) -> Bind:
    """One kernel of a variant of the backward pass alone, its row statistics computed beforehand."""

    def bind(problem: Problem, blocks: BlockShape, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor | None) -> Trial:
        import torch

        from flashbench.kernels import flash_v2_gradients as gradients
        from flashbench.kernels.flash_v2 import flash_v2_forward

        assert grad_out is not None
        options: dict[str, Any] = {"mask": problem.mask, "precision": _precision(problem)}
        out, lse = flash_v2_forward(q, k, v, with_lse=True, **options)
        passes = (blocks,) * len(gradients.KERNELS[variant])  # of these only one is launched
        backward = gradients.prepare(q, k, v, out, lse, grad_out, variant=variant, blocks=passes, **options)
        statistics, launch = backward.statistics, backward.passes[number]
        statistics.kernel[statistics.grid](*statistics.arguments, **statistics.constants)

        def run() -> Any:
            if backward.dq_sums is not None:
                backward.dq_sums.zero_()
            compiled = launch.kernel[launch.grid](*launch.arguments, **launch.constants)
            if backward.dq_sums is not None:
                torch.mul(backward.dq_sums, backward.scale, out=backward.dq)
            return compiled

        return Trial(run, {name: getattr(backward, name) for name in outputs})

    return bind


def _backward_need(kernel: str) -> Callable[..., int]:
    def need(*shape_and_problem: Any) -> int:
        from flashbench.kernels.flash_v2_gradients import SHARED_BYTES

        return SHARED_BYTES[kernel](*shape_and_problem)

    return need


KEYS, QUERIES, ONE_PASS = "flash-v2 backward keys", "flash-v2 backward queries", "flash-v2 backward one-pass"

TUNABLE: dict[str, Tunable] = {
    FORWARD: Tunable("forward", _forward, shared_bytes, lambda s, d: s.block_q * (d + s.block_kv)),
    KEYS: Tunable(
        "backward", _backward("two-pass", 0, "dk", "dv"), _backward_need(KEYS), lambda s, d: s.block_kv * (2 * d + 2 * s.block_q)
    ),
    QUERIES: Tunable(
        "backward", _backward("two-pass", 1, "dq"), _backward_need(QUERIES), lambda s, d: s.block_q * (d + 2 * s.block_kv)
    ),
    ONE_PASS: Tunable(
        "backward", _backward("one-pass", 0, "dq", "dk", "dv"), _backward_need(ONE_PASS), lambda s, d: s.block_kv * (2 * d + 2 * s.block_q)
    ),
    "flash-decode": Tunable(
        "decode", _decode, decode_shared_bytes, lambda s, d: s.block_q * (d + s.block_kv), (16,), (16, 32, 64, 128, 256), (2, 3, 4, 5)
    ),
    "flash-v1": Tunable(
        "forward", _first_version, _first_version_need, lambda s, d: s.block_q * (2 * d + s.block_kv),
        block_kv=(32, 64, 128, 256), num_stages=(1,), descriptors=False,
    ),
}  # fmt: skip
"""By name in the table of block shapes."""
