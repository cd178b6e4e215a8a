"""The project's own FlashAttention of 2022 in Triton, keys in the outer loop (kernels/flash_v1.py): to compare, not to use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashbench.model.schedule import Schedule
from flashbench.providers.spec import Bound, Provider, Unsupported, no_kernel_for_dtype, no_triton
from flashbench.records import Device, Problem

if TYPE_CHECKING:
    from torch import Tensor


def _reason(problem: Problem, device: Device) -> str | None:
    reason = no_kernel_for_dtype(problem, device) or no_triton(device)
    if reason:
        return reason
    if problem.mode in ("backward", "forward_backward"):
        return "flash-v1 has a forward pass only; flash-v2 has both"
    if min(problem.head_dim, problem.head_dim_v) < 16 or max(problem.head_dim, problem.head_dim_v) > 256:
        return f"flash-v1 takes head_dim from 16 to 256, not {problem.head_dim}/{problem.head_dim_v}"
    return None


PROVIDERS = (
    Provider(
        "flash-v1", "flash", "tiled-v1", "the first FlashAttention's loop order in Triton: O, m and l go to memory for every key block",
        _reason, "flashbench.providers.flash_v1:bind",
        Schedule(block_q=128, block_kv=128, accumulator_bytes=4, writes_lse=False),  # its tiles replace these where they are known
    ),
)  # fmt: skip


def bind(problem: Problem, device: Device) -> Bound:
    from flashbench.kernels.flash_v1 import flash_v1_forward, launch_figures
    from flashbench.kernels.interpreter import bf16_works

    if device.triton_interpreter and problem.dtype == "bf16" and not bf16_works():
        raise Unsupported("Triton's interpreter multiplies bf16 wrongly here; use fp16 or fp32")

    options: dict[str, Any] = {"mask": problem.mask, "precision": "tf32" if problem.dtype == "tf32" else "ieee"}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flash_v1_forward(q, k, v, **options)
        return out

    def launch(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
        return launch_figures(q, k, v, **options)

    return Bound(call, launch=launch)
