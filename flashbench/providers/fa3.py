"""FlashAttention-3's own kernels (Dao-AILab/flash-attention, hopper/), from whichever package of them is installed; none is required.

    pip install --no-deps fa3-fwd          27 MB, CUDA 13: bf16 and fp8, forward
    pip install --no-deps tokenspeed-fa3   63 MB, CUDA 13: bf16, fp16 and fp8, sliding windows, forward

The packages differ in what their kernels were built for, and each says so in a module of flags, which is read without importing torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, NamedTuple

from flashbench.model.schedule import Schedule
from flashbench.providers.spec import Bound, Provider, Unsupported, no_kernel_for_dtype
from flashbench.records import Device, Problem

if TYPE_CHECKING:
    from torch import Tensor

INSTALL = (
    "`pip install --no-deps fa3-fwd` (bf16 and fp8) or `pip install --no-deps tokenspeed-fa3` (also fp16 and windows)"
)


class Build(NamedTuple):
    """A package of FlashAttention-3: the module to call, and what its kernels were built without."""

    module: str
    without: frozenset[str]


# The first name is that of the project itself and of tokenspeed-fa3, which leave less out.
MODULES = (("flash_attn_interface", "flash_attn_config"), ("fa3_fwd_interface", "fa3_fwd_config"))
DISABLED = "FLASHATTENTION_DISABLE_"
DESCALES = ("q_descale", "k_descale", "v_descale")


def builds() -> tuple[Build, ...]:
    """The packages installed here, the fuller first."""
    found = []
    for module, config in MODULES:
        if importlib.util.find_spec(module) and importlib.util.find_spec(config):
            flags = importlib.import_module(config).CONFIG["build_flags"]
            without = frozenset(name.removeprefix(DISABLED) for name, value in flags.items() if value)
            found.append(Build(module, without))
    return tuple(found)


def lacking(problem: Problem, build: Build) -> str | None:
    """What a build lacks for a problem, in words, or None."""
    needs = {
        "FP16": ("no fp16", problem.dtype == "fp16"),
        "FP8": ("no fp8", problem.dtype == "fp8"),
        "LOCAL": ("no sliding windows", problem.window is not None),
        "BACKWARD": ("no backward pass", problem.mode in ("backward", "forward_backward")),
    }
    return next((words for flag, (words, needed) in needs.items() if needed and flag in build.without), None)


def _reason(problem: Problem, device: Device) -> str | None:
    reason = no_kernel_for_dtype(problem, device, fp8=True)
    if reason:
        return reason
    if problem.dtype not in ("bf16", "fp16", "fp8"):
        return f"FlashAttention-3 takes bf16, fp16 and fp8 here, not {problem.dtype}"
    step = 16 if problem.dtype == "fp8" else 8
    if problem.head_dim != problem.head_dim_v or problem.head_dim % step or problem.head_dim > 256:
        dims = f"{problem.head_dim}/{problem.head_dim_v}"
        return f"FlashAttention-3 takes one head_dim for Q, K and V, a multiple of {step} up to 256, not {dims}"
    if device.capability != (9, 0):
        return "FlashAttention-3 is written for Hopper, sm_90"
    installed = builds()
    if not installed:
        return f"FlashAttention-3 is not installed; {INSTALL}"
    lacks = [lacking(problem, build) for build in installed]
    if None not in lacks:
        missing = ", ".join(f"{build.module} has {words}" for build, words in zip(installed, lacks, strict=True))
        return f"no package of FlashAttention-3 here was built for it: {missing}; {INSTALL}"
    return None


PROVIDERS = (
    Provider(
        "fa3", "flash", "tiled-v2", "FlashAttention-3 itself, from an optional package", _reason,
        "flashbench.providers.fa3:bind", Schedule(longest_first=True, walks_down=True),
    ),
)  # fmt: skip


def bind(problem: Problem, device: Device) -> Bound:
    """The first installed build that has kernels for the problem; Unsupported where it cannot be loaded."""
    import torch  # noqa: F401 - the packages' libraries look for its symbols

    build = next((build for build in builds() if lacking(problem, build) is None), None)
    if build is None:
        raise Unsupported(_reason(problem, device) or f"FlashAttention-3 is not installed; {INSTALL}")
    try:
        attend = importlib.import_module(build.module).flash_attn_func
    except (ImportError, OSError) as error:
        raise Unsupported(f"{build.module} is installed, and cannot be loaded: {error}") from None
    options: dict[str, Any] = {"causal": problem.mask != "none", "softmax_scale": problem.head_dim**-0.5}
    if problem.window is not None:
        options["window_size"] = (problem.window - 1, 0)  # keys before a query's own, and behind it

    def call(q: Tensor, k: Tensor, v: Tensor, descales: Tensor | None = None) -> Tensor:
        # Its axes are (batch, position, head, channel); views will do. Masks are aligned bottom-right, as here. An e4m3 V lies along its
        # channels, as the others do, and its kernel transposes tiles of it.
        given = {} if descales is None else dict(zip(DESCALES, descales.unbind(-1), strict=True))
        result = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options, **given)
        out: Tensor = result[0] if isinstance(result, tuple) else result  # older versions return the log-sum-exp too
        return out.transpose(1, 2)

    return Bound(call, backend=lambda *_: build.module)
