"""The reference: plain attention in float64 on the true problem, and its gradients, computed in chunks; or one of its products alone.

The same chunks in the case's own dtype give the error that plain attention itself makes, from which the tolerance is taken. The true
problem of e4m3 tensors is that of the numbers which they stand for; plain attention in e4m3 multiplies and adds up in fp32, and rounds its
weights, as a product of e4m3 numbers asks for: times LIFT, after their sum was taken (FlashAttention-3, hopper/softmax.h).
Gradients follow from P = softmax(S), O = PV: dV = Pᵀ dO, dP = dO Vᵀ, dS = P * (dP - rowsum(P * dP)), dQ = scale dS K,
dK = scale dSᵀ Q (FlashAttention-2, arXiv 2307.08691, section 2.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashbench.kernels.quantization import E4M3
from flashbench.measure.workload import Inputs, matmul_precision, output_dtype
from flashbench.model.flops import useful_flops
from flashbench.model.masks import visible_range
from flashbench.model.tensors import seeing_queries
from flashbench.records import Device, Problem

FULL_RATE_FLOAT64 = ((8, 0), (9, 0), (10, 0))
"""Capabilities whose float64 is at least half as fast as their float32."""
SLOW_FLOAT64_FLOPS = 2e13
"""Elsewhere float64 runs at about 1 TFLOP/s; beyond this much work the reference is float32."""

GPU_CHUNK_ELEMENTS = 2**28
"""Scores of one chunk: 2 GiB in float64, of which five live at once in backward."""
CPU_CHUNK_ELEMENTS = 2**22

LIFT = 2.0**8
"""The largest weight in e4m3, which ends at 448: small weights keep 8 bits more."""


@dataclass(frozen=True)
class Reference:
    """True results, and the error of plain attention in the case's dtype against them."""

    true: dict[str, Tensor]
    """`out`, and `dq`, `dk`, `dv` where the mode has gradients."""
    naive_error_norm: dict[str, float]
    naive_error_max: dict[str, float]
    dtype: str
    mean_value: float = 0.0
    """Mean |v|: about how large the terms are whose weighted sum is `out`, which may itself be far smaller. 0 where there is no `out`."""


def make_reference(problem: Problem, inputs: Inputs, device: Device) -> Reference:
    """Compute the reference once; all providers of the problem share it."""
    exact = _exact_dtype(problem, device, inputs.computes)
    compute = _attention if inputs.computes == "attention" else _product
    true = compute(problem, inputs, exact)
    with matmul_precision(problem.dtype):
        own = compute(problem, inputs, inputs.q.dtype)
    own = {name: value.to(output_dtype(problem)) for name, value in own.items()}
    norms = {name: error_norm(own[name], true[name]) for name in true}
    maxima = {name: error_max(own[name], true[name]) for name in true}
    v = stood_for(inputs, torch.float32)[2]
    mean_value = float(v.abs().mean(dtype=torch.float32)) if "out" in true else 0.0
    return Reference(true, norms, maxima, str(exact).removeprefix("torch."), mean_value)


def stood_for(inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The q, k and v of the true problem: the inputs as they are, or the numbers in `dtype` that e4m3 ones stand for."""
    if inputs.descales is None:
        return inputs.q, inputs.k, inputs.v
    of_q, of_k, of_v = inputs.descales.to(dtype)[:, :, None, None].unbind(-1)
    group = inputs.q.shape[1] // inputs.k.shape[1]
    return (
        inputs.q.to(dtype) * of_q.repeat_interleave(group, 1),
        inputs.k.to(dtype) * of_k,
        inputs.v.to(dtype) * of_v,
    )


def error_norm(value: Tensor, true: Tensor) -> float:
    """||value - true|| / ||true||; the absolute norm where the truth is zero."""
    scale = float(torch.linalg.vector_norm(true))
    return float(torch.linalg.vector_norm(value.to(true.dtype) - true)) / (scale or 1.0)


def error_max(value: Tensor, true: Tensor) -> float:
    """max |value - true|."""
    return float((value.to(true.dtype) - true).abs().max())


def _exact_dtype(problem: Problem, device: Device, computes: str) -> torch.dtype:
    if (
        device.kind == "cuda"
        and device.capability not in FULL_RATE_FLOAT64
        and useful_flops(problem) > SLOW_FLOAT64_FLOPS
    ):
        return torch.float32
    row = problem.seq_kv if computes == "scores" else problem.head_dim + problem.head_dim_v
    elements = problem.batch * problem.heads_q * problem.seq_q * row * 4
    return torch.float64 if elements * 8 < 0.3 * device.memory_bytes else torch.float32


@dataclass(frozen=True)
class _Chunk:
    """Heads `first_head:end_head` of batch x heads_kv, queries `first:end`, and the keys that any of them sees."""

    heads: slice
    rows: slice
    keys: slice
    hidden: Tensor | None
    """(rows, keys) boolean, True where the key is hidden."""


def _chunks(problem: Problem, device: torch.device) -> Iterator[_Chunk]:
    group = problem.heads_q // problem.heads_kv
    limit = GPU_CHUNK_ELEMENTS if device.type == "cuda" else CPU_CHUNK_ELEMENTS
    per_head = group * problem.seq_q * problem.seq_kv
    rows = problem.seq_q if per_head <= limit else max(1, limit // (group * problem.seq_kv))
    all_heads = problem.batch * problem.heads_kv
    heads = min(all_heads, max(1, limit // (group * rows * problem.seq_kv)))
    dead = problem.seq_q - seeing_queries(problem)
    for start in range(dead, problem.seq_q, rows):
        end = min(start + rows, problem.seq_q)
        first_key = visible_range(problem.mask, problem.seq_q, problem.seq_kv, start)[0]
        end_key = visible_range(problem.mask, problem.seq_q, problem.seq_kv, end - 1)[1]
        hidden = _hidden(problem, start, end, first_key, end_key, device)
        for head in range(0, all_heads, heads):
            yield _Chunk(
                slice(head, min(head + heads, all_heads)), slice(start, end), slice(first_key, end_key), hidden
            )


def _hidden(
    problem: Problem, start: int, end: int, first_key: int, end_key: int, device: torch.device
) -> Tensor | None:
    if problem.mask == "none":
        return None
    ranges = [visible_range(problem.mask, problem.seq_q, problem.seq_kv, i) for i in range(start, end)]
    first, last = torch.tensor(ranges, device=device).T[:, :, None]
    key = torch.arange(first_key, end_key, device=device)[None, :]
    hidden = (key < first) | (key >= last)
    return hidden if bool(hidden.any()) else None


def _attention(problem: Problem, inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    group = problem.heads_q // problem.heads_kv
    flat = problem.batch * problem.heads_kv
    scale = problem.head_dim**-0.5
    softmax = torch.softmax
    if dtype == E4M3:
        dtype, softmax = torch.float32, _softmax_in_e4m3
    q, k, v = stood_for(inputs, dtype)

    def per_query_head(tensor: Tensor) -> Tensor:
        return tensor.reshape(flat, group, problem.seq_q, tensor.shape[-1])

    q = per_query_head(q)
    k, v = (t.reshape(flat, problem.seq_kv, t.shape[-1]) for t in (k, v))
    grad_out = per_query_head(inputs.grad_out) if inputs.grad_out is not None else None
    zeros = {"dtype": dtype, "device": q.device}
    out = torch.zeros(flat, group, problem.seq_q, problem.head_dim_v, **zeros)
    dq = torch.zeros(q.shape, **zeros) if grad_out is not None else out
    # Gradients of K and V are sums over chunks: in a short dtype they are kept in float32, as every library does.
    sums = {"dtype": torch.promote_types(dtype, torch.float32), "device": q.device}
    dk, dv = (torch.zeros(t.shape, **sums) if grad_out is not None else out for t in (k, v))

    for chunk in _chunks(problem, q.device):
        rows = chunk.rows.stop - chunk.rows.start
        heads = chunk.heads.stop - chunk.heads.start
        q_c = q[chunk.heads, :, chunk.rows].to(dtype).reshape(heads, group * rows, problem.head_dim)
        k_c, v_c = (t[chunk.heads, chunk.keys].to(dtype) for t in (k, v))
        scores = (q_c * scale) @ k_c.transpose(1, 2)
        if chunk.hidden is not None:
            scores.view(heads, group, rows, -1).masked_fill_(chunk.hidden, float("-inf"))
        p = softmax(scores, dim=-1)
        del scores
        out[chunk.heads, :, chunk.rows] = (p @ v_c).view(heads, group, rows, -1)
        if grad_out is not None:
            do = grad_out[chunk.heads, :, chunk.rows].to(dtype).reshape(heads, group * rows, problem.head_dim_v)
            dv[chunk.heads, chunk.keys] += p.transpose(1, 2) @ do
            dp = do @ v_c.transpose(1, 2)
            ds = p * (dp - (p * dp).sum(-1, keepdim=True))
            dq[chunk.heads, :, chunk.rows] = (ds @ k_c).mul_(scale).view(heads, group, rows, -1)
            dk[chunk.heads, chunk.keys] += (ds.transpose(1, 2) @ q_c).mul_(scale)

    results = {"out": out.view(problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v)}
    if grad_out is not None:
        results["dq"] = dq.view(inputs.q.shape)
        results["dk"] = dk.to(dtype).view(inputs.k.shape)
        results["dv"] = dv.to(dtype).view(inputs.v.shape)
    return results


def _softmax_in_e4m3(scores: Tensor, dim: int) -> Tensor:
    """The softmax of fp32 scores with each weight as e4m3 has it, beside the largest of its row."""
    weights = (scores - scores.amax(dim, keepdim=True)).exp_().mul_(LIFT)
    return weights.to(E4M3).to(scores.dtype) / weights.sum(dim, keepdim=True)


def _product(problem: Problem, inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """One product alone, a key/value head at a time: S = QKᵀ (batch, heads_q, seq_q, seq_kv), or O = PV of the given weights."""
    flat = problem.batch * problem.heads_kv
    left, right = inputs.arguments
    if inputs.computes == "scores":
        right = right.transpose(-1, -2)
    rows = left.reshape(flat, -1, left.shape[-1])  # the query heads of a group, one below the other
    columns = right.reshape(flat, *right.shape[-2:])
    out = torch.empty(flat, rows.shape[1], right.shape[-1], dtype=dtype, device=left.device)
    for head in range(flat):
        torch.matmul(rows[head].to(dtype), columns[head].to(dtype), out=out[head])
    return {"out": out.view(problem.batch, problem.heads_q, problem.seq_q, -1)}
