"""The project's own FlashAttention-3 for Hopper (kernels/flash_v3.py), and the variants of it that a ladder compares."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

from flashbench.model.schedule import Schedule
from flashbench.providers.spec import Bound, Provider, Unsupported, no_kernel_for_dtype
from flashbench.records import Device, Problem

if TYPE_CHECKING:
    from torch import Tensor

LEAST_TRITON = (3, 6)
FEW_CHANNELS = ("three-consumers",)
"""Variants whose registers end at head dimension 64."""
SUMMARIES = {
    "bare": "a rung of its ladder: a producer and consumers, and nothing else",
    "overlap": "a rung of its ladder: the softmax runs beside the products of its own warpgroup",
    "persistent": "a rung of its ladder: and one program a multiprocessor takes tile after tile",
    "one-tile": "flash-v3 with a program for each tile",
    "no-overlap": "flash-v3 with its products and its softmax one after the other",
    "pingpong": "flash-v3 with warpgroups that take turns at the matrix unit",
    "late-rescale": "flash-v3 that rescales its output beside the next block's scores",
    "named-release": "flash-v3 that gives tiles back through named barriers",
    "three-consumers": "flash-v3 with three warpgroups that compute",
}


def triton_version(device: Device) -> tuple[int, ...] | None:
    """Major and minor version of the device's Triton, or None without one."""
    found = re.match(r"(\d+)\.(\d+)", device.versions.get("triton", ""))
    return (int(found[1]), int(found[2])) if found else None


def _reason(problem: Problem, device: Device, variant: str = "") -> str | None:
    return no_kernel_for_dtype(problem, device) or _no_hopper(device) or _no_tiles(problem, variant)


def _no_hopper(device: Device) -> str | None:
    if device.kind != "cuda" or device.triton_interpreter:
        return "flash-v3 needs a Hopper GPU, and no TRITON_INTERPRET: Gluon has no interpreter"
    if device.capability != (9, 0):
        found = "of unknown kind" if device.capability is None else "sm_{}{}".format(*device.capability)
        return f"flash-v3 is written for Hopper, sm_90; this GPU is {found}"
    version = triton_version(device)
    if version is None:
        return "Triton is not installed; `pip install triton`"
    if version < LEAST_TRITON:
        return f"flash-v3 needs Triton 3.6 or later, for Gluon; this is {device.versions['triton']}"
    return None


def _no_tiles(problem: Problem, variant: str) -> str | None:
    if problem.dtype not in ("bf16", "fp16"):
        return f"flash-v3 takes bf16 and fp16, not {problem.dtype}"
    if problem.mode in ("backward", "forward_backward"):
        return "flash-v3 has a forward pass only; flash-v2 has both"
    dims = (problem.head_dim, problem.head_dim_v)
    if any(d % 8 or d > 256 for d in dims):
        return f"flash-v3 takes multiples of 8 up to 256 as head_dim, not {dims[0]}/{dims[1]}"
    if variant in FEW_CHANNELS and max(dims) > 64:
        return f"three consumers have registers for a head_dim up to 64, not {max(dims)}"
    return None


def _tiles(variant: str) -> Schedule:
    """Tiles at head dimension 128, for a plan made without a device: a row tells those it was launched with, and the models use these."""
    return Schedule(
        block_q=192 if variant == "three-consumers" else 128,
        block_kv=128,
        longest_first=variant not in ("bare", "overlap", "persistent"),
    )


PROVIDERS = (
    Provider(
        "flash-v3", "flash", "tiled-v2", "FlashAttention-3 for Hopper in Gluon, this project's own; never run on a GPU so far", _reason,
        "flashbench.providers.flash_v3:bind", _tiles(""),
    ),
    *(
        Provider(
            f"flash-v3:{variant}", "flash", "tiled-v2", summary, partial(_reason, variant=variant),
            "flashbench.providers.flash_v3:bind", _tiles(variant), source=variant,
        )
        for variant, summary in SUMMARIES.items()
    ),
)  # fmt: skip


def bind(problem: Problem, _device: Device, variant: str = "") -> Bound:
    """The kernel, or a variant of it; Unsupported where this Triton's Gluon lacks a call under every name that is known."""
    from flashbench.kernels import gluon_names

    missing = gluon_names.missing()
    if missing:
        raise Unsupported(missing)
    from flashbench.kernels.flash_v3_launches import flash_v3_forward, launch_figures

    options: dict[str, Any] = {"mask": problem.mask, "variant": variant}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flash_v3_forward(q, k, v, **options)
        return out

    def launch(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
        return launch_figures(q, k, v, **options)

    return Bound(call, launch=launch)
