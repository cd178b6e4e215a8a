"""Inputs of a problem and the operation that is timed, checked and weighed.

The same seed gives every provider of a problem the same bits. Inputs are standard normal: zeros run faster on a GPU, because
its power and so its clock depend on the data.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashbench.kernels.quantization import E4M3, Quantized, quantized
from flashbench.providers.spec import Bound
from flashbench.records import Problem

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
"""What torch computes in. Tensors of fp8 are e4m3, made of fp32 ones."""


def output_dtype(problem: Problem) -> torch.dtype:
    """That of the inputs; bf16 for e4m3 ones."""
    return TORCH_DTYPES.get(problem.dtype, torch.bfloat16)


@dataclass(frozen=True)
class PagedCache:
    """K and V once more, in pages that lie in any order; what is behind the last key of a sequence is BEHIND_THE_END."""

    k: Tensor
    """(pages, heads_kv, page_size, head_dim)."""
    v: Tensor
    """(pages, heads_kv, page_size, head_dim_v)."""
    page_table: Tensor
    """(batch, pages of a sequence) int32: which pages a sequence has, in the order of its keys."""
    lengths: Tensor
    """(batch,) int32: keys of each sequence."""


BEHIND_THE_END = 1e4
"""Large, so that a kernel which reads too far shows it; finite, so that one which gives it no weight is not blamed."""


@dataclass(frozen=True)
class Inputs:
    """q (batch, heads_q, seq_q, head_dim), k (batch, heads_kv, seq_kv, head_dim), v (..., head_dim_v); `grad_out` like the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor | None
    cache: PagedCache | None = None
    """Of a problem with a page_size: what its providers get, while the reference reads k and v."""
    descales: Tensor | None = None
    """Of an fp8 problem, (batch, heads_kv, 3) fp32: what one unit of q, k and v stands for in the heads of each group."""
    computes: str = "attention"
    """What the provider makes of them: attention, or one product alone, `scores` QKᵀ or `values` PV."""
    weights: Tensor | None = None
    """P (batch, heads_q, seq_q, seq_kv) for `values`: uniform in [0, 1), as weights are before the division by their sum."""

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """What a provider's call is given (providers/spec.py, Bound)."""
        if self.computes == "scores":
            return self.q, self.k
        if self.weights is not None:
            return self.weights, self.v
        if self.descales is not None:
            return self.q, self.k, self.v, self.descales
        if self.cache is None:
            return self.q, self.k, self.v
        return self.q, self.cache.k, self.cache.v, self.cache.page_table, self.cache.lengths


def make_inputs(problem: Problem, seed: int, device: torch.device, computes: str = "attention") -> Inputs:
    """Fresh standard-normal inputs, a function of the problem and the seed only; and weights for a provider that computes `values`.

    Those of fp8 are quantised, and stand for such numbers times a power of two (`_in_e4m3`).
    """
    # The mode and the mask do not enter: forward and backward, causal and not, see the same q, k and v.
    shape = f"{problem.batch} {problem.heads_q} {problem.heads_kv} {problem.seq_q} {problem.seq_kv} {problem.head_dim} {problem.head_dim_v}"
    generator = torch.Generator(device=device)
    generator.manual_seed(zlib.crc32(shape.encode()) ^ seed)
    dtype = TORCH_DTYPES.get(problem.dtype, torch.float32)

    def normal(heads: int, seq: int, dim: int) -> Tensor:
        return torch.randn(problem.batch, heads, seq, dim, generator=generator, device=device).to(dtype)

    q = normal(problem.heads_q, problem.seq_q, problem.head_dim)
    k = normal(problem.heads_kv, problem.seq_kv, problem.head_dim)
    v = normal(problem.heads_kv, problem.seq_kv, problem.head_dim_v)
    needs_gradient = problem.mode in ("backward", "forward_backward")
    grad_out = normal(problem.heads_q, problem.seq_q, problem.head_dim_v) if needs_gradient else None
    cache = None if problem.page_size is None else _in_pages(k, v, problem.page_size, generator)
    weights = None
    if computes == "values":
        shape_p = (problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv)
        weights = torch.rand(shape_p, generator=generator, device=device).to(dtype)
    descales = None
    if problem.dtype == "fp8":
        q, k, v, descales = _in_e4m3(q, k, v)
    return Inputs(q, k, v, grad_out, cache, descales, computes, weights)


def _in_e4m3(q: Tensor, k: Tensor, v: Tensor) -> Quantized:
    """Quantised tensors whose units stand for 1/2, 1 or 2 times as much from head to head, so that a kernel which takes another head's is
    found out; those of q for as much more as those of k for less, so that scores are what they were."""
    units = quantized(q, k, v)
    batch, heads = (torch.arange(n, device=q.device) for n in units.descales.shape[:2])
    factor = torch.exp2((batch[:, None] + heads) % 3 - 1.0)
    return units._replace(descales=units.descales * torch.stack([factor, 1 / factor, factor], -1))


def _in_pages(k: Tensor, v: Tensor, page_size: int, generator: torch.Generator) -> PagedCache:
    """A cache whose pages, of all sequences together, lie in random order."""
    batch, _, seq_kv, _ = k.shape
    count = -(-seq_kv // page_size)
    order = torch.randperm(batch * count, generator=generator, device=k.device)

    def pages(tensor: Tensor) -> Tensor:
        heads, dim = tensor.shape[1], tensor.shape[3]
        whole = torch.nn.functional.pad(tensor, (0, 0, 0, count * page_size - seq_kv), value=BEHIND_THE_END)
        by_page = whole.view(batch, heads, count, page_size, dim).transpose(1, 2).reshape(-1, heads, page_size, dim)
        return torch.empty_like(by_page).index_copy_(0, order, by_page)

    lengths = torch.full((batch,), seq_kv, dtype=torch.int32, device=k.device)
    return PagedCache(pages(k), pages(v), order.to(torch.int32).view(batch, count), lengths)


def same_inputs(problem: Problem, seed: int, inputs: Inputs) -> bool:
    """Whether `inputs` still hold the bits that `make_inputs` drew: a provider must not write to them."""
    fresh = make_inputs(problem, seed, inputs.q.device, inputs.computes)
    pairs = zip(_tensors(fresh), _tensors(inputs), strict=True)
    return all(torch.equal(before, after) for before, after in pairs)


def _tensors(inputs: Inputs) -> list[Tensor]:
    found = [t for t in (inputs.k, inputs.v, *inputs.arguments, inputs.grad_out) if t is not None]
    return [t.view(torch.uint8) if t.dtype == E4M3 else t for t in found]  # not every torch compares e4m3


@dataclass(frozen=True)
class Operation:
    """What one sample runs, and the same computation with its results returned for the check."""

    run: Callable[[], object]
    results: Callable[[], dict[str, Tensor]]
    """`out`, and in the modes with a backward pass `dq`, `dk`, `dv`."""


def make_operation(problem: Problem, bound: Bound, inputs: Inputs) -> Operation:
    """The timed call of a mode. Backward runs through `torch.autograd.grad`, so that no gradient is accumulated into a leaf."""
    if inputs.grad_out is None:
        arguments = inputs.arguments if bound.store is None else bound.store(*inputs.arguments)

        def forward() -> Tensor:
            with torch.no_grad():
                return bound.call(*arguments)

        return Operation(forward, lambda: {"out": forward()})

    q, k, v = (t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    grad_out = inputs.grad_out

    def both() -> tuple[Tensor, tuple[Tensor, ...]]:
        out = bound.call(q, k, v)
        return out, torch.autograd.grad(out, (q, k, v), grad_out)

    def results() -> dict[str, Tensor]:
        out, (dq, dk, dv) = both()
        return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}

    if problem.mode == "forward_backward":
        return Operation(both, results)

    graph_of = bound.call(q, k, v)

    def backward() -> tuple[Tensor, ...]:
        gradients: tuple[Tensor, ...] = torch.autograd.grad(graph_of, (q, k, v), grad_out, retain_graph=True)
        return gradients

    def backward_results() -> dict[str, Tensor]:
        dq, dk, dv = backward()
        return {"out": graph_of.detach(), "dq": dq, "dk": dk, "dv": dv}

    return Operation(backward, backward_results)


@contextlib.contextmanager
def matmul_precision(dtype: str) -> Iterator[None]:
    """fp32 products in full precision, and as tf32 only for the dtype of that name; the old setting comes back afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
