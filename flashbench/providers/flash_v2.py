"""The project's own FlashAttention-2 in Triton: kernels/flash_v2.py forward, and both variants of kernels/flash_v2_backward.py."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from flashbench.model.schedule import Schedule
from flashbench.providers.spec import Bound, Provider, Unsupported, no_kernel_for_dtype, no_triton
from flashbench.records import Device, Problem

if TYPE_CHECKING:
    from torch import Tensor

BACKWARD_MODES = ("backward", "forward_backward")


def _reason(problem: Problem, device: Device) -> str | None:
    reason = no_kernel_for_dtype(problem, device) or no_triton(device)
    if reason:
        return reason
    if not min(problem.head_dim, problem.head_dim_v) >= 16 or max(problem.head_dim, problem.head_dim_v) > 256:
        return f"flash-v2 takes head_dim from 16 to 256, not {problem.head_dim}/{problem.head_dim_v}"
    return None


def _reason_one_pass(problem: Problem, device: Device) -> str | None:
    if problem.mode not in BACKWARD_MODES:
        return "flash-v2-one-pass differs from flash-v2 in its backward pass only; its forward pass is flash-v2's"
    return _reason(problem, device)


# The tiles are those of an H200 at head dimension 128 in half precision, for a plan made without a device: a row tells those it was
# launched with, and the models use these. Queries: held by a program of the forward pass and of the one that makes dQ, or passed over by
# it where one pass makes all gradients; keys: held by a program that makes dK and dV.
PROVIDERS = (
    Provider(
        "flash-v2", "flash", "tiled-v2", "FlashAttention-2 in portable Triton, this project's own; backward in two passes", _reason,
        "flashbench.providers.flash_v2:bind", Schedule(128, 64, blocks_per_sm=2, backward_blocks_per_sm=2, longest_first=True, walks_down=True, two_pass_backward=True),
    ),
    Provider(
        "flash-v2-one-pass", "flash", "tiled-v2", "the same with its backward pass in one pass, dQ summed in memory", _reason_one_pass,
        "flashbench.providers.flash_v2:bind_one_pass", Schedule(64, 128, longest_first=True),
    ),
)  # fmt: skip


def bind(problem: Problem, device: Device) -> Bound:
    return _bind(problem, device, "two-pass")


def bind_one_pass(problem: Problem, device: Device) -> Bound:
    return _bind(problem, device, "one-pass")


def _bind(problem: Problem, device: Device, backward: str) -> Bound:
    from flashbench.kernels.flash_v2_autograd import flash_v2
    from flashbench.kernels.interpreter import bf16_works

    if device.triton_interpreter and problem.dtype == "bf16" and not bf16_works():
        raise Unsupported("Triton's interpreter multiplies bf16 wrongly here; use fp16 or fp32")
    options: dict[str, Any] = {"mask": problem.mask, "precision": "tf32" if problem.dtype == "tf32" else "ieee"}
    figures = _backward_figures if problem.mode in BACKWARD_MODES else _forward_figures
    return Bound(partial(flash_v2, **options, backward=backward), launch=partial(figures, options, backward))


def _forward_figures(options: dict[str, Any], _: str, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    from flashbench.kernels.flash_v2 import launch_figures

    return launch_figures(q, k, v, **options)


def _backward_figures(options: dict[str, Any], variant: str, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    from flashbench.kernels.flash_v2 import flash_v2_forward
    from flashbench.kernels.flash_v2_gradients import launch_figures, prepare

    out, lse = flash_v2_forward(q, k, v, with_lse=True, **options)
    return launch_figures(prepare(q, k, v, out, lse, out, variant=variant, **options))
