"""The project's own decoding kernel in Triton (kernels/flash_decode.py): few queries against a long cache, contiguous or in pages."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from flashbench.kernels.splits import SPLIT_KEYS
from flashbench.model.schedule import Schedule
from flashbench.providers.spec import Bound, Provider, Unsupported, no_kernel_for_dtype, no_triton
from flashbench.records import Device, Problem

if TYPE_CHECKING:
    from torch import Tensor


def _reason(problem: Problem, device: Device) -> str | None:
    contiguous = dataclasses.replace(problem, page_size=None)
    reason = no_kernel_for_dtype(contiguous, device) or no_triton(device)
    if reason:
        return reason
    if problem.mode != "decode":
        return f"flash-decode is for mode decode, few queries against a long cache; flash-v2 runs {problem.mode}"
    if max(problem.head_dim, problem.head_dim_v) > 256:
        return f"flash-decode takes head_dim up to 256, not {problem.head_dim}/{problem.head_dim_v}"
    return None


PROVIDERS = (
    Provider(
        name="flash-decode",
        family="flash",
        algorithm="decode",
        summary="Flash-Decoding in portable Triton, this project's own: keys in splits, contiguous or paged",
        unsupported=_reason,
        loader="flashbench.providers.flash_decode:bind",
        schedule=Schedule(block_q=16, block_kv=SPLIT_KEYS, blocks_per_sm=3, writes_lse=False),
    ),
)


def bind(problem: Problem, device: Device) -> Bound:
    from flashbench.kernels.flash_decode import flash_decode, launch_figures
    from flashbench.kernels.interpreter import bf16_works

    if device.triton_interpreter and problem.dtype == "bf16" and not bf16_works():
        raise Unsupported("Triton's interpreter multiplies bf16 wrongly here; use fp16 or fp32")

    options: dict[str, Any] = {"mask": problem.mask, "precision": "tf32" if problem.dtype == "tf32" else "ieee"}

    def call(q: Tensor, k: Tensor, v: Tensor, *cache: Tensor) -> Tensor:
        out: Tensor = flash_decode(q, k, v, *cache, **options)
        return out

    def launch(q: Tensor, k: Tensor, v: Tensor, *cache: Tensor) -> dict[str, Any]:
        return launch_figures(q, k, v, *cache, **options)

    return Bound(call, launch=launch)
