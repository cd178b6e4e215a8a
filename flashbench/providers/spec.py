"""What a provider is: a spec that costs no torch import, and what its loading half hands to the worker."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flashbench.model.flops import PRODUCTS
from flashbench.model.schedule import Schedule
from flashbench.records import Device, Problem

if TYPE_CHECKING:
    from torch import Tensor


class Unsupported(Exception):
    """Raised by a loading half, or by a first call, when only the library itself could say that it has no kernel."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A provider ready to run one problem on one device.

    `call` takes q (batch, heads_q, seq_q, head_dim), k (batch, heads_kv, seq_kv, head_dim) and v (batch, heads_kv, seq_kv,
    head_dim_v) and returns (batch, heads_q, seq_q, head_dim_v) in the inputs' dtype. Backward runs through autograd.

    A provider that computes `scores` takes q and k and returns S = QKᵀ, unscaled, (batch, heads_q, seq_q, seq_kv); one that computes
    `values` takes such a matrix of weights and v and returns their product.

    Of a problem with a page_size it takes q, k (pages, heads_kv, page_size, head_dim), v (pages, heads_kv, page_size, head_dim_v), the
    page table (batch, pages of a sequence) and the length of each sequence (batch,), both int32.

    Of an fp8 problem it takes q, k and v in e4m3 and the descales, contiguous fp32 (batch, heads_kv, 3): what one unit of q, k and v
    stands for in the heads of each group. It returns bf16.
    """

    call: Callable[..., Tensor]
    backend: Callable[..., str | None] | None = None
    """Names the implementation that these inputs really get, where the library chooses."""
    launch: Callable[..., dict[str, Any]] | None = None
    """Block shape, warps, registers, spills and shared memory of the kernel for these inputs: the project's own kernels tell."""
    store: Callable[..., tuple[Tensor, ...]] | None = None
    """The inputs as this provider wants them stored, made once and not timed: `call` takes what it returns in their place."""


@dataclass(frozen=True, slots=True)
class Provider:
    """An attention implementation. Everything here is plain data and arithmetic over a Device record."""

    name: str
    family: str
    algorithm: str
    """Which model counts its bytes and memory: see model/traffic.py."""
    summary: str
    unsupported: Callable[[Problem, Device], str | None]
    """The reason why it cannot run a problem on a device, or None."""
    loader: str
    """`module:function` of the loading half: (problem, device) -> Bound; with a `source`, (problem, device, source) -> Bound."""
    schedule: Schedule = field(default_factory=Schedule)
    """What the models need to know of it beyond the algorithm: tiles, extra passes over the scores, copies of K and V."""
    source: str | None = None
    """Where a provider of the user's own comes from: `file.py:function`, or `module:function` of an entry point."""

    @property
    def computes(self) -> str:
        """attention, or of its two products alone: scores or values. Work, reference and speed-ups go by it."""
        return PRODUCTS.get(self.algorithm, "attention")

    def bind(self, problem: Problem, device: Device) -> Bound:
        """Import the implementation (worker only) and bind it to a problem."""
        module, _, name = self.loader.partition(":")
        load = getattr(importlib.import_module(module), name)
        bound: Bound = load(problem, device) if self.source is None else load(problem, device, self.source)
        return bound


def no_kernel_for_dtype(problem: Problem, device: Device, *, fp8: bool = False) -> str | None:
    """Reasons that hold for every implementation that works on ordinary PyTorch tensors, and on e4m3 ones where it takes `fp8`."""
    if problem.page_size is not None:
        return "a paged cache is not supported by this provider"
    if problem.dtype == "fp8" and not fp8:
        return "fp8 is not supported by this provider"
    if reason := no_mode_in_fp8(problem):
        return reason
    if device.kind == "cpu" and problem.dtype == "tf32":
        return "tf32 products exist on GPUs only"
    capability = device.capability
    if capability is not None and problem.dtype in ("bf16", "tf32") and capability < (8, 0):
        return f"{problem.dtype} needs sm_80 or newer; this GPU is sm_{capability[0]}{capability[1]}"
    return None


def no_mode_in_fp8(problem: Problem) -> str | None:
    """The reason that holds for whoever takes fp8."""
    if problem.dtype == "fp8" and problem.mode != "forward":
        return f"fp8 is measured in mode forward only, not {problem.mode}"
    return None


def no_product(problem: Problem, device: Device) -> str | None:
    """Reasons that hold for every provider of one matrix product alone."""
    if problem.mode != "forward":
        return f"one matrix product alone has a forward pass only, not {problem.mode}"
    if problem.mask != "none":
        return f"one matrix product alone computes every score, and has no mask '{problem.mask}'"
    return no_kernel_for_dtype(problem, device)


def no_triton(device: Device) -> str | None:
    """Reasons that hold for every Triton kernel."""
    if "triton" not in device.versions:
        return "Triton is not installed; `pip install triton`"
    if device.kind == "cpu" and not device.triton_interpreter:
        return "Triton needs a GPU; TRITON_INTERPRET=1 runs it on the CPU to check it, without timing"
    if device.capability is not None and device.capability < (8, 0):
        return "needs sm_80 or newer"
    return None
