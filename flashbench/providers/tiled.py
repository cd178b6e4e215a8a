"""The tiled online softmax in plain PyTorch: exact attention from blocks, without an N x N matrix.

For a block of queries, m is the running row maximum, l the running sum and o the unnormalised output; each block of keys
updates them by m' = max(m, max s), alpha = exp(m - m'), l' = alpha l + sum exp(s - m'), o' = alpha o + exp(s - m') v
(Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135, section 3.1). It is here to be read and compared,
not to be fast: every block is a handful of small kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashbench.model.schedule import Schedule
from flashbench.model.tensors import seeing_queries
from flashbench.providers.spec import Bound, Provider, no_kernel_for_dtype
from flashbench.records import Device, Problem

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 256
"""Queries and keys of one block: S of eight heads is then 2 MiB in fp32, which stays in a CPU's L2 and L3."""

PROVIDERS = (
    Provider(
        name="tiled",
        family="tiled",
        algorithm="tiled-v2",
        summary="the online softmax block by block in plain PyTorch; exact, and slow on a GPU",
        unsupported=no_kernel_for_dtype,
        loader="flashbench.providers.tiled:bind",
        schedule=Schedule(block_q=BLOCK, block_kv=BLOCK, writes_lse=False, stored_blocks=True),
    ),
)


def bind(problem: Problem, device: Device) -> Bound:
    """The online softmax for `problem`; sums are kept in fp32 (fp64 for fp64 inputs)."""
    import torch

    from flashbench.providers.masking import hidden_keys

    scale = problem.head_dim**-0.5
    group = problem.heads_q // problem.heads_kv
    dead = problem.seq_q - seeing_queries(problem)
    hidden = hidden_keys(problem, torch.device(device.kind, device.index))

    def rows(q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
        """Output of one block of queries (batch, heads_kv, group, rows, head_dim) whose first query is `first`."""
        end = first + q.shape[3]
        total = torch.promote_types(q.dtype, torch.float32)
        m = q.new_full(q.shape[:-1], float("-inf"), dtype=total)
        l = q.new_zeros(q.shape[:-1], dtype=total)  # noqa: E741 - the paper's letter
        o = q.new_zeros((*q.shape[:-1], problem.head_dim_v), dtype=total)
        for start in range(0, problem.seq_kv, BLOCK):
            keys = slice(start, min(start + BLOCK, problem.seq_kv))
            block = hidden[first:end, keys] if hidden is not None else None
            if block is not None and bool(block.all()):
                continue
            s = (q @ k[:, :, None, keys].transpose(-1, -2)).to(total)
            if block is not None:
                s = s.masked_fill(block, float("-inf"))
            m_new = torch.maximum(m, s.amax(-1))
            # A row that has seen no key yet keeps m = -inf; it is shifted by 0 instead, and all its weights are 0.
            shift = torch.where(m_new == float("-inf"), torch.zeros_like(m_new), m_new)
            alpha = torch.exp(m - shift)
            p = torch.exp(s - shift[..., None])
            l = alpha * l + p.sum(-1)  # noqa: E741
            o = alpha[..., None] * o + p.to(v.dtype) @ v[:, :, None, keys]
            m = m_new
        return (o / l[..., None]).to(q.dtype)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, _, seq_q, dim = q.shape
        grouped = (q * scale).reshape(batch, problem.heads_kv, group, seq_q, dim)
        blocks = [q.new_zeros(batch, problem.heads_kv, group, dead, problem.head_dim_v)] if dead else []
        for first in range(dead, seq_q, BLOCK):
            blocks.append(rows(grouped[:, :, :, first : first + BLOCK], k, v, first))
        return torch.cat(blocks, dim=3).reshape(batch, problem.heads_q, seq_q, problem.head_dim_v)

    return Bound(call)
