"""The project's own FlashAttention-2 forward kernel in Triton (kernels/flash_v2.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashbench.providers.spec import Bound, Provider, Unsupported, no_kernel_for_dtype
from flashbench.records import Device, Problem

if TYPE_CHECKING:
    from torch import Tensor


def _reason(problem: Problem, device: Device) -> str | None:
    reason = no_kernel_for_dtype(problem, device)
    if reason:
        return reason
    if "triton" not in device.versions:
        return "Triton is not installed; `pip install triton`"
    if device.kind == "cpu" and not device.triton_interpreter:
        return "Triton needs a GPU; TRITON_INTERPRET=1 runs it on the CPU to check it, without timing"
    if device.capability is not None and device.capability < (8, 0):
        return "needs sm_80 or newer"
    if problem.mode in ("backward", "forward_backward"):
        return "flash-v2 has no backward pass yet"
    if not min(problem.head_dim, problem.head_dim_v) >= 16 or max(problem.head_dim, problem.head_dim_v) > 256:
        return f"flash-v2 takes head_dim from 16 to 256, not {problem.head_dim}/{problem.head_dim_v}"
    return None


PROVIDERS = (
    Provider(
        "flash-v2", "flash", "tiled-v2", "FlashAttention-2 forward in portable Triton, this project's own", _reason,
        "flashbench.providers.flash_v2:bind",
    ),
)  # fmt: skip


def bind(problem: Problem, device: Device) -> Bound:
    from flashbench.kernels.flash_v2 import flash_v2_forward, launch_figures
    from flashbench.kernels.interpreter import bf16_works

    if device.triton_interpreter and problem.dtype == "bf16" and not bf16_works():
        raise Unsupported("Triton's interpreter multiplies bf16 wrongly here; use fp16 or fp32")

    options: dict[str, Any] = {"mask": problem.mask, "precision": "tf32" if problem.dtype == "tf32" else "ieee"}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flash_v2_forward(q, k, v, **options)
        return out

    def launch(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
        return launch_figures(q, k, v, **options)

    return Bound(call, launch=launch)
