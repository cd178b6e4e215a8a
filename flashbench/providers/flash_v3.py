"""The project's own FlashAttention-3 for Hopper (kernels/flash_v3.py, flash_v3_backward.py), and the variants of it that a ladder compares."""

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
BACKWARD_MODES = ("backward", "forward_backward")
MAX_BACKWARD_HEAD_DIM = 128
FEW_CHANNELS = ("two-consumers",)
"""Variants that differ from flash-v3 only up to head dimension 64, where it has three consumers."""
SUMMARIES = {
    "bare": "a rung of its ladder: a producer and consumers, and nothing else",
    "overlap": "a rung of its ladder: the softmax runs beside the products of its own warpgroup",
    "persistent": "a rung of its ladder: and one program a multiprocessor takes tile after tile",
    "dealt": "a rung of its ladder: and causal tiles start with the longest, dealt out beforehand",
    "queue": "a rung of its ladder: and drawn from a queue instead",
    "early-wait": "a rung of its ladder: and waits for the product with V behind the row maxima, not behind the whole softmax",
    "one-tile": "flash-v3 with a program for each tile",
    "no-overlap": "flash-v3 with its products and its softmax one after the other",
    "no-pingpong": "flash-v3 without turns of its warpgroups at the matrix unit",
    "named-release": "flash-v3 that gives tiles back through named barriers",
    "two-consumers": "flash-v3 with two warpgroups that compute, where it has three",
}
"""Variants of the forward kernel."""
BACKWARD_SUMMARIES = {
    "deterministic": "flash-v3 whose dQ comes from flash-v2's kernel: gradients with the same bits at every call",
}
"""Variants of the backward pass."""
FP8_SUMMARIES = {
    "stored-v": "flash-v3 in fp8 whose V was stored transposed beforehand, which is not timed; flash-v3 transposes it in every call",
}
"""Variants in fp8."""


def triton_version(device: Device) -> tuple[int, ...] | None:
    """Major and minor version of the device's Triton, or None without one."""
    found = re.match(r"(\d+)\.(\d+)", device.versions.get("triton", ""))
    return (int(found[1]), int(found[2])) if found else None


def _reason(problem: Problem, device: Device, variant: str = "") -> str | None:
    return no_kernel_for_dtype(problem, device, fp8=True) or _no_hopper(device) or _no_tiles(problem, variant)


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
    if problem.dtype not in ("bf16", "fp16", "fp8"):
        return f"flash-v3 takes bf16, fp16 and fp8, not {problem.dtype}"
    fp8 = problem.dtype == "fp8"
    if variant and fp8 != (variant in FP8_SUMMARIES):
        return f"flash-v3:{variant} is a variant for {'bf16 and fp16' if fp8 else 'fp8'}, not {problem.dtype}"
    backward = problem.mode in BACKWARD_MODES
    if backward and variant in SUMMARIES:
        return f"flash-v3:{variant} differs from flash-v3 in its forward pass only; its backward pass is flash-v3's"
    if not backward and variant in BACKWARD_SUMMARIES:
        return f"flash-v3:{variant} differs from flash-v3 in its backward pass only; its forward pass is flash-v3's"
    dims = (problem.head_dim, problem.head_dim_v)
    if fp8 and dims[0] % 16:
        return f"flash-v3 takes multiples of 16 up to 256 as head_dim of fp8 queries and keys, not {dims[0]}"
    if any(d % 8 or d > 256 for d in dims):
        return f"flash-v3 takes multiples of 8 up to 256 as head_dim, not {dims[0]}/{dims[1]}"
    if backward and max(dims) > MAX_BACKWARD_HEAD_DIM:
        return (
            f"flash-v3's backward pass has registers for dK and dV up to head_dim {MAX_BACKWARD_HEAD_DIM}, "
            f"not {dims[0]}/{dims[1]}; flash-v2 takes more"
        )
    if variant in FEW_CHANNELS and max(dims) > 64:
        return f"at head_dim {max(dims)} flash-v3 has two consumers itself; three have registers up to 64"
    return None


def _tiles(variant: str) -> Schedule:
    """Tiles at head dimension 128, for a plan made without a device: a row tells those it was launched with, and the models use these."""
    return Schedule(
        block_q=128,
        block_kv=128,
        longest_first=variant not in ("bare", "overlap", "persistent"),
        walks_down=True,
        two_pass_backward=variant == "deterministic",
        transposes_v=variant != "stored-v",
    )


PROVIDERS = (
    Provider(
        "flash-v3", "flash", "tiled-v2", "FlashAttention-3 for Hopper in Gluon, this project's own", _reason,
        "flashbench.providers.flash_v3:bind", _tiles(""),
    ),
    *(
        Provider(
            f"flash-v3:{variant}", "flash", "tiled-v2", summary, partial(_reason, variant=variant),
            "flashbench.providers.flash_v3:bind", _tiles(variant), source=variant,
        )
        for variant, summary in (SUMMARIES | BACKWARD_SUMMARIES | FP8_SUMMARIES).items()
    ),
)  # fmt: skip


def bind(problem: Problem, _device: Device, variant: str = "") -> Bound:
    """The kernel, or a variant of it; Unsupported where the variant is what flash-v3 does by itself, and where this Triton's Gluon lacks a call
    under every name that is known."""
    from flashbench.kernels import gluon_names

    missing = gluon_names.missing()
    if missing:
        raise Unsupported(missing)
    if problem.dtype == "fp8":
        return _bind_fp8(problem, stored=variant == "stored-v")
    if problem.mode in BACKWARD_MODES:
        return _bind_backward(problem, variant)
    from flashbench.kernels.flash_v3_designs import design_for
    from flashbench.kernels.flash_v3_launches import flash_v3_forward, launch_figures

    own, asked = (
        design_for(
            problem.head_dim, problem.head_dim_v, name,
            seq_q=problem.seq_q, seq_kv=problem.seq_kv, causal=problem.mask != "none", window=problem.window,
        )
        for name in ("", variant)
    )  # fmt: skip
    if variant and asked == own:
        raise Unsupported(f"flash-v3 is flash-v3:{variant} by itself at this head_dim and length")
    options: dict[str, Any] = {"mask": problem.mask, "variant": variant}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flash_v3_forward(q, k, v, **options)
        return out

    def launch(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
        return launch_figures(q, k, v, **options)

    return Bound(call, launch=launch)


def _bind_fp8(problem: Problem, *, stored: bool) -> Bound:
    """V is transposed in every call, as FlashAttention-3's kernel does it in every tile, or once if it is `stored` so."""
    from flashbench.kernels.flash_v3_fp8 import flash_v3_fp8_forward, launch_figures, prepare
    from flashbench.kernels.flash_v3_keys_last import keys_last
    from flashbench.kernels.flash_v3_launches import run

    launch = partial(launch_figures, mask=problem.mask)
    if not stored:
        return Bound(partial(flash_v3_fp8_forward, mask=problem.mask), launch=launch)

    def store(q: Tensor, k: Tensor, v: Tensor, descales: Tensor) -> tuple[Tensor, ...]:
        return q, k, keys_last(v), descales

    def call(q: Tensor, k: Tensor, v_keys_last: Tensor, descales: Tensor) -> Tensor:
        attention = prepare(q, k, v_keys_last, descales, mask=problem.mask)
        run(attention)
        return attention.out

    return Bound(call, launch=launch, store=store)


def _bind_backward(problem: Problem, variant: str) -> Bound:
    from flashbench.kernels.flash_v3_gradients import flash_v3, launch_figures, prepare
    from flashbench.kernels.flash_v3_launches import flash_v3_forward

    def launch(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
        out, lse = flash_v3_forward(q, k, v, mask=problem.mask, with_lse=True)
        return launch_figures(prepare(q, k, v, out, lse, out, mask=problem.mask, variant=variant))

    return Bound(partial(flash_v3, mask=problem.mask, backward=variant), launch=launch)
