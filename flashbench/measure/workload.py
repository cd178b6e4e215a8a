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

from flashbench.providers.spec import Bound
from flashbench.records import Problem

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}


@dataclass(frozen=True)
class Inputs:
    """q (batch, heads_q, seq_q, head_dim), k (batch, heads_kv, seq_kv, head_dim), v (..., head_dim_v); `grad_out` like the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor | None


def make_inputs(problem: Problem, seed: int, device: torch.device) -> Inputs:
    """Fresh standard-normal inputs, a function of the problem and the seed only."""
    # The mode and the mask do not enter: forward and backward, causal and not, see the same q, k and v.
    shape = f"{problem.batch} {problem.heads_q} {problem.heads_kv} {problem.seq_q} {problem.seq_kv} {problem.head_dim} {problem.head_dim_v}"
    generator = torch.Generator(device=device)
    generator.manual_seed(zlib.crc32(shape.encode()) ^ seed)
    dtype = TORCH_DTYPES[problem.dtype]

    def normal(heads: int, seq: int, dim: int) -> Tensor:
        return torch.randn(problem.batch, heads, seq, dim, generator=generator, device=device).to(dtype)

    q = normal(problem.heads_q, problem.seq_q, problem.head_dim)
    k = normal(problem.heads_kv, problem.seq_kv, problem.head_dim)
    v = normal(problem.heads_kv, problem.seq_kv, problem.head_dim_v)
    needs_gradient = problem.mode in ("backward", "forward_backward")
    grad_out = normal(problem.heads_q, problem.seq_q, problem.head_dim_v) if needs_gradient else None
    return Inputs(q, k, v, grad_out)


def same_inputs(problem: Problem, seed: int, inputs: Inputs) -> bool:
    """Whether `inputs` still hold the bits that `make_inputs` drew: a provider must not write to them."""
    fresh = make_inputs(problem, seed, inputs.q.device)
    pairs = ((fresh.q, inputs.q), (fresh.k, inputs.k), (fresh.v, inputs.v), (fresh.grad_out, inputs.grad_out))
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


@dataclass(frozen=True)
class Operation:
    """What one sample runs, and the same computation with its results returned for the check."""

    run: Callable[[], object]
    results: Callable[[], dict[str, Tensor]]
    """`out`, and in the modes with a backward pass `dq`, `dk`, `dv`."""


def make_operation(problem: Problem, bound: Bound, inputs: Inputs) -> Operation:
    """The timed call of a mode. Backward runs through `torch.autograd.grad`, so that no gradient is accumulated into a leaf."""
    if inputs.grad_out is None:

        def forward() -> Tensor:
            with torch.no_grad():
                return bound.call(inputs.q, inputs.k, inputs.v)

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
