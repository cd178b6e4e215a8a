"""What the tests of the backward kernels run, in a child that interprets or on a GPU; and how far gradients may be from float64's."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch
from forward_runs import options_of
from problems import ROUNDING, SCORE_ROUNDING, TORCH_DTYPES, AttentionProblem, attention, inputs, tensor, visible_keys

from flashbench.kernels.blocks import BlockShape

NAMES = ("dq", "dk", "dv")
UNIT = ROUNDING | {"tf32": 2.0**-9}
"""Relative error of a term; a matrix unit cuts both operands of a tf32 product after the tenth bit, and does not round."""
SMALLEST = {"fp16": 2.0**-24}
"""What a weight or a gradient is rounded to a multiple of, where that is coarse."""
OPERAND_ROUNDING = {"tf32": 2.0**-10}
"""Relative error of a term of dP where its operands are rounded on their way into the product."""
FP32_ROUNDING = 2.0**-24
MOST = 4
"""Expected errors that a single element may be off."""


class GradientErrors(NamedTuple):
    """Errors of dq, dk and dv (by name), as multiples of what rounding alone is expected to make; see `reference_gradients`."""

    norm: dict[str, float]
    """An average, and of few independent errors one that may lie far off; see `compared`."""
    maximum: dict[str, float]
    """Of single elements, so that one wrong row does not hide among many right ones."""
    non_finite: dict[str, int]

    @property
    def acceptable(self) -> bool:
        return not any(self.non_finite.values()) and max(self.norm.values()) <= 1 and max(self.maximum.values()) <= MOST


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def reference_gradients(
    case: AttentionProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor
) -> tuple[Gradients, Gradients]:
    """dQ, dK, dV of plain attention in float64, and the error expected of each element in the case's dtype.

    Expected errors: P and dS are rounded to the dtype and so is O, from which delta comes, as they stand in the FlashAttention-2
    algorithm; an error in a score is the same relative error in P, of the forward pass too, where it moves delta by dS times that. Independent
    errors of a sum's terms add as squares. dP and delta err by their own size and not by that of dS: where a query sees one key, or one
    has nearly all of its weight, they cancel, and little more than their errors is left.
    """
    p = case.problem
    longest_sum = FP32_ROUNDING * math.sqrt(max(p.seq_q, p.seq_kv))  # of fp32 additions, one after the other
    unit, smallest = max(UNIT[p.dtype], longest_sum), SMALLEST.get(p.dtype, 0.0)
    operand = OPERAND_ROUNDING.get(p.dtype, 0.0)
    scale = p.head_dim**-0.5 if case.scale is None else case.scale
    largest_score = abs(scale) * (q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max()).item()
    weight_error = unit + SCORE_ROUNDING[p.dtype] * largest_score
    seen = visible_keys(p.mask, p.seq_q, p.seq_kv, q.device)
    found = [torch.zeros(x.shape, dtype=torch.float64, device=q.device) for x in (q, k, v)]
    squares = [torch.zeros_like(x) for x in found]
    for b in range(p.batch):
        for h in range(p.heads_q):
            kv = h // (p.heads_q // p.heads_kv)
            query, key, value, d_o = (x.double() for x in (q[b, h], k[b, kv], v[b, kv], d_out[b, h]))
            score = (query @ key.T * scale).masked_fill(~seen, -math.inf)
            weight = torch.nan_to_num(torch.softmax(score, 1))  # a row that sees nothing gives NaN
            out, d_p = weight @ value, d_o @ value.T
            delta = (d_o * out).sum(1, keepdim=True)
            d_s = weight * (d_p - delta)
            found[0][b, h] = scale * d_s @ key
            found[1][b, kv] += scale * d_s.T @ query
            found[2][b, kv] += weight.T @ d_o

            delta_terms, d_p_terms = ((d_o * out) ** 2).sum(1, keepdim=True), d_o**2 @ value.T**2
            delta_error = unit**2 * delta_terms + _squared_sum_error(p.head_dim_v, delta_terms, delta)
            delta_error += weight_error**2 * (d_s**2).sum(1, keepdim=True)
            d_p_error = operand**2 * d_p_terms + _squared_sum_error(p.head_dim_v, d_p_terms, d_p)
            d_s_error = (weight_error * d_s.abs() + weight * d_p_error.sqrt() + smallest) ** 2 * seen
            squares[0][b, h] = scale**2 * (d_s_error @ key**2 + delta_error * (weight @ key) ** 2)
            squares[1][b, kv] += scale**2 * (d_s_error + weight**2 * delta_error).T @ query**2
            squares[2][b, kv] += ((weight_error * weight + smallest) ** 2 * seen).T @ d_o**2
    expected = ((square + (weight_error * x) ** 2).sqrt() + smallest for square, x in zip(squares, found, strict=True))
    return tuple(found), tuple(expected)  # type: ignore[return-value]


def _squared_sum_error(count: int, squares: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Square of the error expected of fp32 sums of `count` terms, added one after the other, from the terms' sum of squares and sum.

    Each addition rounds the sum so far by at most u of it (Higham, "Accuracy and Stability of Numerical Algorithms", section 4.2), and
    independently. The mean square of the sums so far, over random orders of the terms, is below (squares + total^2) / 2.
    """
    return FP32_ROUNDING**2 * count * (squares + total**2) / 2


def _concentration(error: torch.Tensor) -> float:
    """How few rows make up the error: 1 where a single one errs, 1 / n where n do so alike."""
    squares = error.square().sum(-1)
    total = squares.sum()
    return (squares / total).square().sum().item() if total > 0 else 1.0


def compared(
    case: AttentionProblem, gradients: Gradients, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor
) -> GradientErrors:
    """Errors of the gradients of `case` for inputs q, k, v and d_out.

    All that a query gives dQ and dK shares the error of its delta, and all queries share that of dP if they have the same dO. So a norm is an
    average over few errors where the queries are few, and the fewer they are, the more it may be off, up to what a single error may.
    """
    wanted_gradients, expected_errors = reference_gradients(case, q, k, v, d_out)
    alone = 1.0 if d_out.stride(2) == 0 else _concentration(expected_errors[0])
    allowance = 1 + (MOST - 1) * alone
    floor = torch.finfo(torch.float32).tiny
    norm, maximum = {}, {}
    for name, got, wanted, error in zip(NAMES, gradients, wanted_gradients, expected_errors, strict=True):
        difference = (got.double() - wanted).abs()
        norm[name] = (difference.norm() / (allowance * error.norm() + floor)).item()
        maximum[name] = (difference / (error + floor)).max().item()
    return GradientErrors(
        norm, maximum, {name: int((~x.isfinite()).sum()) for name, x in zip(NAMES, gradients, strict=True)}
    )


def gradient_of_output(case: AttentionProblem, layout: str, device: str) -> torch.Tensor:
    """dO, lying in memory as `layout` says; `expanded` is one number seen everywhere, as the gradient of a sum is."""
    p, dtype = case.problem, TORCH_DTYPES[case.problem.dtype]
    shape = (p.batch, p.heads_q, p.seq_q, p.head_dim_v)
    if layout == "expanded":
        return torch.full((), 0.75, dtype=dtype, device=device).expand(shape)
    return tensor(*shape, layout, dtype, device, 1.0)


def backward_errors(
    case: AttentionProblem,
    variant: str,
    blocks: tuple[BlockShape, ...] | None = None,
    device: str = "cpu",
    seed: int = 0,
    layout: str = "dense",
    score: float = 0.0,
    delta_factor: float = 1.0,
) -> GradientErrors:
    """Errors of a variant's gradients on a problem against float64. `score` (for the usual scale) stands in every score.

    `delta_factor` puts a fault in: the backward pass needs O for delta alone.
    """
    from flashbench.kernels.flash_v2 import flash_v2_forward
    from flashbench.kernels.flash_v2_gradients import flash_v2_backward

    q, k, v = inputs(case, device, seed)
    if score:
        q[..., 0], k[..., 0] = 1.0, score * case.problem.head_dim**0.5
    d_out = gradient_of_output(case, layout, device)
    out, lse = flash_v2_forward(q, k, v, with_lse=True, **options_of(case))
    gradients = flash_v2_backward(
        q, k, v, out * delta_factor, lse, d_out, variant=variant, blocks=blocks, **options_of(case)
    )
    return compared(case, gradients, q, k, v, d_out)


def autograd_errors(case: AttentionProblem, variant: str, device: str = "cpu") -> GradientErrors:
    """The same through `flash_v2` and `torch.autograd.grad`."""
    from flashbench.kernels.flash_v2_autograd import flash_v2

    q, k, v = (x.requires_grad_() for x in inputs(case, device))
    d_out = gradient_of_output(case, "dense", device)
    out = flash_v2(q, k, v, backward=variant, **options_of(case))
    gradients: Any = torch.autograd.grad(out, (q, k, v), d_out)
    return compared(case, gradients, q.detach(), k.detach(), v.detach(), d_out)


def autograd_says() -> dict[str, Any]:
    """Answers to questions about `flash_v2` as an operation, on a tiny problem."""
    from flashbench.errors import UsageError
    from flashbench.kernels.flash_v2_autograd import flash_v2
    from flashbench.kernels.flash_v2_gradients import flash_v2_backward

    q, k, v = (torch.randn(1, 1, 16, 16) for _ in range(3))
    leaf = q.clone().requires_grad_()
    with torch.no_grad():
        without_grad = flash_v2(leaf, k, v)
    says: dict[str, Any] = {
        "graph with a leaf": flash_v2(leaf, k, v).grad_fn is not None,
        "graph without leaves": flash_v2(q, k, v).grad_fn is not None,
        "graph without grad": without_grad.grad_fn is not None,
        "the same output": torch.equal(flash_v2(leaf, k, v).detach(), without_grad),
    }
    (first,) = torch.autograd.grad((flash_v2(leaf, k, v) ** 2).sum(), leaf, create_graph=True)
    refusals = {
        "twice": lambda: first.sum().backward(),
        "unknown": lambda: flash_v2(q, k, v, backward="onepass"),
        "other shape": lambda: flash_v2_backward(q, k, v, q, q[..., 0].contiguous(), q[..., :8]),
    }
    for name, refused in refusals.items():
        try:
            refused()
        except (RuntimeError, UsageError) as error:
            says[name] = str(error)
    return says


def ranges_of_queries(
    first_key: int, seq_q: int, seq_kv: int, mask: str, window: int, block_q: int, block_kv: int
) -> list[int]:
    """The bounds of the loops over queries for a block of keys."""
    from order_kernel import record_query_ranges

    found = torch.full((4,), -1, dtype=torch.int32)
    record_query_ranges[(1,)](
        found, first_key, seq_q, seq_kv, window, BLOCK_Q=block_q, BLOCK_KV=block_kv,
        CAUSAL=mask != "none", WINDOW=mask == "window",
    )  # fmt: skip
    bounds: list[int] = found.tolist()
    return bounds


def provider_errors(name: str, mode: str) -> tuple[GradientErrors, dict[str, Any]]:
    """Errors of a provider's gradients as a visit of the mode gets them, and what it says of its launch."""
    from flashbench.measure.workload import make_inputs, make_operation
    from flashbench.providers.table import get
    from flashbench.records import Device

    case = attention("provider", "4/2", "40/70", "32/16", dtype="fp32", mask="causal").but(mode=mode)
    device = Device("cpu", "interpreter", 0, triton_interpreter=True, versions={"triton": "3"})
    assert get(name).unsupported(case.problem, device) is None
    bound = get(name).bind(case.problem, device)
    given = make_inputs(case.problem, 0, torch.device("cpu"))
    results = make_operation(case.problem, bound, given).results()
    assert given.grad_out is not None
    assert bound.launch is not None
    found = compared(case, tuple(results[x] for x in NAMES), given.q, given.k, given.v, given.grad_out)
    return found, bound.launch(given.q, given.k, given.v)


def elements_written_beyond_the_end(
    case: AttentionProblem, variant: str, blocks: tuple[BlockShape, ...] | None = None, device: str = "cpu"
) -> int:
    """How many elements a variant wrote behind its gradients and sums, which here are the start of larger buffers."""
    from flashbench.kernels import flash_v2_gradients as gradients
    from flashbench.kernels.flash_v2 import flash_v2_forward

    untouched = -7.0
    q, k, v = inputs(case, device)
    out, lse = flash_v2_forward(q, k, v, with_lse=True, **options_of(case))
    backward = gradients.prepare(q, k, v, out, lse, out, variant=variant, blocks=blocks, **options_of(case))
    buffers = {
        id(x): torch.full((x.numel() + 4096,), untouched, dtype=x.dtype, device=device)
        for x in (backward.dq, backward.dk, backward.dv, backward.dq_sums)
        if x is not None
    }

    def moved(argument: Any) -> Any:
        base = getattr(argument, "base", argument)  # of a descriptor
        if id(base) not in buffers:
            return argument
        start = buffers[id(base)][: base.numel()].view(base.shape)
        return dataclasses.replace(argument, base=start) if argument is not base else start

    passes = tuple(x._replace(arguments=tuple(map(moved, x.arguments))) for x in backward.passes)
    gradients.run(backward._replace(passes=passes))
    return sum(int((buffer[-4096:] != untouched).sum()) for buffer in buffers.values())
