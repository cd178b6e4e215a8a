"""Attention problems on which kernels have gone wrong in public, and the float64 answer to them.

A table, so that every kernel meets the same problems: a test module picks those that its kernel claims, runs it, and asserts on `Errors`.
Imports torch and the vocabulary only; where Triton runs, interpreted or on a GPU, is the caller's affair.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flashbench.records import Problem

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "tf32": 2.0**-11, "fp32": 2.0**-21}
"""Relative error of a weight as the second product takes it; for fp32 that of exp2, the least exact step."""
SCORE_ROUNDING = {"bf16": 2.0**-22, "fp16": 2.0**-22, "fp32": 2.0**-22, "tf32": 2.0**-11}
"""Error of a score as a share of the largest: of the fp32 sum, or of the operands where they are rounded to tf32 on the way in."""

LAYOUTS = ("dense", "transposed", "packed", "channels-first", "sliced")


@dataclass(frozen=True)
class AttentionProblem:
    """A `Problem` with what it leaves open: how q, k and v lie in memory, the scale, and the size of the entries."""

    name: str
    problem: Problem
    layouts: tuple[str, str, str] = ("dense", "dense", "dense")
    scale: float | None = None
    magnitude: float = 1.0
    value_magnitude: float = 1.0

    def but(self, **changes: object) -> AttentionProblem:
        """The same with fields of the record or of its `Problem` changed."""
        own = {f.name for f in dataclasses.fields(self)}
        inner = {name: value for name, value in changes.items() if name not in own}
        outer = {name: value for name, value in changes.items() if name in own}
        return dataclasses.replace(self, problem=dataclasses.replace(self.problem, **inner), **outer)


def attention(
    name: str,
    heads: str = "2",
    seq: str = "64",
    dim: str = "64",
    *,
    batch: int = 1,
    dtype: str = "fp16",
    mask: str = "none",
    **rest: object,
) -> AttentionProblem:
    """A problem in short: `heads="4/2"` is query over key/value heads, `seq="7/30"` queries over keys, `dim="192/128"` D over Dv."""

    def pair(text: str) -> tuple[int, int]:
        first, _, second = text.partition("/")
        return int(first), int(second or first)

    (heads_q, heads_kv), (seq_q, seq_kv), (head_dim, head_dim_v) = pair(heads), pair(seq), pair(dim)
    problem = Problem(batch, heads_q, heads_kv, seq_q, seq_kv, head_dim, head_dim_v, dtype, mask)
    return AttentionProblem(name, problem, **rest)  # type: ignore[arg-type]


SMALL: tuple[AttentionProblem, ...] = (
    # KF-01: kernels that used the first 64 channels only. KF-02: head dimensions that are no power of two.
    *(attention(f"head dim {d}", dim=str(d)) for d in (16, 32, 64, 128, 256)),
    *(attention(f"head dim {d}, padded", dim=str(d)) for d in (1, 20, 72, 80, 96, 160, 192)),
    attention("head dim of V smaller", dim="192/128", mask="causal"),
    attention("head dim of V larger", dim="40/96", mask="causal"),
    # KF-03: lengths beside a multiple of the block. KF-04: lengths below a tile.
    *(attention(f"{n} positions, {mask}", "1", str(n), mask=mask) for n in (63, 65, 127, 129) for mask in ("none", "causal")),
    *(attention(f"{n} positions, {mask}", seq=str(n), mask=mask) for n in (1, 2, 7, 8, 15) for mask in ("none", "causal")),
    # KF-10: queries and keys of different number, bottom-right aligned; with more queries than keys, some see none.
    *(
        attention(f"{seq} queries over keys, {mask}", "1", seq, mask=mask, dtype="fp32")
        for seq in ("2/5", "5/2", "1/200", "70/200", "200/70")
        for mask in ("none", "causal", "window:33")
    ),
    # KF-18 and the two edges of a window: inside one block, across several, wider than the sequence.
    *(attention(f"window of {w}", "1", "200", "32", mask=f"window:{w}", dtype="fp32") for w in (1, 2, 31, 64, 65, 150, 1000)),
    # DE-06: groups of query heads.
    attention("grouped queries", "6/2", "70/90", batch=2, mask="causal"),
    attention("one key/value head", "4/1", "70/90", batch=2),
    # KF-05, KF-06: each tensor with strides of its own.
    attention("K and V packed", "4", layouts=("dense", "packed", "packed")),
    attention("channels not contiguous", layouts=("channels-first", "dense", "channels-first"), mask="causal"),
    attention("rows further apart than their length", dim="40", layouts=("sliced", "sliced", "sliced"), mask="causal"),
    # KF-12: the largest score times a negative scale is the smallest.
    *(
        attention(f"scale {scale}, {mask}", "1", "70", "32", mask=mask, dtype="fp32", scale=scale, magnitude=4.0)
        for scale in (-0.5, 0.0, 1.0)
        for mask in ("none", "causal")
    ),
    # KF-13: values beyond fp16, so that weights must not be cast to it.
    attention("bf16 values of 1e5", seq="128", dtype="bf16", value_magnitude=1e5),
    *(attention(f"{dtype}, {mask}", "2", "130", mask=mask, dtype=dtype) for dtype in ("bf16", "fp32") for mask in ("none", "causal")),
    # Softmax over one key is constant: dQ and dK are 0, and what is left is the rounding of what cancels.
    *(attention(f"{seq} queries over keys in long rows", "1", seq, "128", batch=2, dtype="fp32") for seq in ("1/1", "30/1")),
)  # fmt: skip
"""Small enough for the interpreter: a second or less each."""

LARGE: tuple[AttentionProblem, ...] = (
    *(
        attention(f"{dtype} d {d} {mask}", "4", "1024", str(d), batch=2, dtype=dtype, mask=mask)
        for dtype in ("bf16", "fp16", "fp32", "tf32")
        for d in (64, 128, 256)
        for mask in ("none", "causal", "window:300")
    ),
    *(attention(f"d {d}, padded", "4", "500/1000", d, dtype="bf16", mask="causal") for d in ("72", "80", "96", "160", "192", "192/128")),
    attention("grouped queries over long keys", "32/8", "257/4099", "128", batch=2, dtype="bf16", mask="causal"),
    attention("more queries than keys", "4", "1000/300", "128", dtype="bf16", mask="causal"),
    attention("one query", "32/8", "1/4097", "128", batch=4, dtype="bf16", mask="causal"),
    attention("token-major tensors", "16", "2000", "128", dtype="bf16", layouts=("transposed",) * 3, mask="causal"),
)  # fmt: skip
"""For a GPU: many blocks in every direction."""


def tensor(
    batch: int, heads: int, seq: int, dim: int, layout: str, dtype: torch.dtype, device: str, magnitude: float
) -> torch.Tensor:
    """Random (batch, heads, seq, dim) values, lying in memory as `layout` says; whatever lies between them is NaN."""
    values = (torch.randn(batch, heads, seq, dim, device=device) * magnitude).to(dtype)
    holders = {
        "dense": lambda: torch.empty(batch, heads, seq, dim),
        "transposed": lambda: torch.empty(batch, seq, heads, dim).transpose(1, 2),
        "packed": lambda: torch.empty(batch, seq, 2, heads, dim)[:, :, 1].transpose(1, 2),
        "channels-first": lambda: torch.empty(batch, heads, dim, seq).transpose(2, 3),
        "sliced": lambda: torch.empty(batch, heads, seq + 64, dim + 8)[:, :, :seq, :dim],
    }
    with torch.device(device):
        view = holders[layout]()
    storage = torch.full(
        (view.untyped_storage().nbytes() // view.element_size(),), math.nan, dtype=dtype, device=device
    )
    return storage.as_strided(view.shape, view.stride(), view.storage_offset()).copy_(values)


def inputs(
    case: AttentionProblem, device: str = "cpu", seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of a problem."""
    torch.manual_seed(seed)
    p = case.problem
    dtype = TORCH_DTYPES[p.dtype]
    shapes = (
        (p.heads_q, p.seq_q, p.head_dim),
        (p.heads_kv, p.seq_kv, p.head_dim),
        (p.heads_kv, p.seq_kv, p.head_dim_v),
    )
    sizes = (case.magnitude, case.magnitude, case.value_magnitude)
    q, k, v = (
        tensor(p.batch, *shape, layout, dtype, device, size)
        for shape, layout, size in zip(shapes, case.layouts, sizes, strict=True)
    )
    return q, k, v


def visible_keys(mask: str, seq_q: int, seq_kv: int, device: str | torch.device = "cpu") -> torch.Tensor:
    """(seq_q, seq_kv), True where the query sees the key: written from the definition, key by key."""
    at_key = torch.arange(seq_q, device=device)[:, None] + seq_kv - seq_q
    key = torch.arange(seq_kv, device=device)[None, :]
    if mask == "none":
        return torch.ones(seq_q, seq_kv, dtype=torch.bool, device=device)
    age = at_key - key
    return (age >= 0) & (age < int(mask.removeprefix("window:"))) if mask.startswith("window:") else age >= 0


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: str = "none", scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain attention in float64, a head at a time: (out, natural-log LSE); a row that sees nothing gives 0 and -inf."""
    batch, heads_q, seq_q, head_dim = q.shape
    group = heads_q // k.shape[1]
    seen = visible_keys(mask, seq_q, k.shape[2], q.device)
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.empty(batch, heads_q, seq_q, v.shape[3], dtype=torch.float64, device=q.device)
    lse = torch.empty(batch, heads_q, seq_q, dtype=torch.float64, device=q.device)
    for b in range(batch):
        for h in range(heads_q):
            s = (q[b, h].double() @ k[b, h // group].double().T * scale).masked_fill(~seen, -math.inf)
            lse[b, h] = s.logsumexp(1)
            weights = (s - torch.where(lse[b, h] == -math.inf, 0.0, lse[b, h])[:, None]).exp()
            out[b, h] = weights @ v[b, h // group].double()
    return out, lse


class Errors(NamedTuple):
    """How far an output is from the reference, beside what its dtype allows."""

    norm: float
    """||out - reference|| / ||reference||, or the plain norm where the reference is 0."""
    maximum: float
    """max |out - reference| / max |v|."""
    lse: float
    """max |lse - reference|; rows that see no key must be -inf in both and count 0. 0 where no LSE was asked for."""
    bound: float
    """For norm and maximum."""
    lse_bound: float
    non_finite: int

    @property
    def acceptable(self) -> bool:
        return self.non_finite == 0 and max(self.norm, self.maximum) <= self.bound and self.lse <= self.lse_bound


def errors(
    case: AttentionProblem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> Errors:
    """Errors of `out` and `lse` for inputs q, k, v of `case`.

    The bound has two parts: each weight is rounded to v's dtype and so is the output; and an error in a score becomes, through the
    exponential, the same relative error in a weight, so that large scores cost digits.
    """
    problem = case.problem
    expected, expected_lse = reference(q, k, v, problem.mask, case.scale)
    difference = out.double() - expected
    scale = problem.head_dim**-0.5 if case.scale is None else case.scale
    largest_score = abs(scale) * (q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max()).item()
    score_error = SCORE_ROUNDING[problem.dtype] * largest_score
    lse_error = 0.0
    if lse is not None:
        both_empty = (lse == -math.inf) & (expected_lse == -math.inf)
        lse_error = torch.where(both_empty, 0.0, (lse.double() - expected_lse).abs()).max().item()
    return Errors(
        norm=(difference.norm() / (expected.norm() if expected.any() else 1.0)).item(),
        maximum=(difference.abs().max() / v.double().abs().max()).item(),
        lse=lse_error,
        bound=2 * ROUNDING[problem.dtype] + score_error,
        lse_bound=2.0**-20 + score_error,
        non_finite=int((~out.isfinite()).sum()),
    )
