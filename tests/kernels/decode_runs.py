"""What the tests of the decoding kernel run: in a child that interprets, or in this process on a GPU. Plain data in, plain data out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from forward_runs import options_of
from problems import TORCH_DTYPES, AttentionProblem, Errors, errors, inputs

from flashbench.kernels.blocks import BlockShape

Cache = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Pages of K, pages of V, the page table, the lengths."""


def in_pages(
    k: torch.Tensor,
    v: torch.Tensor,
    page_size: int,
    filler: float = float("nan"),
    token_major: bool = False,
    spare: int = 3,
) -> Cache:
    """K and V (batch, heads, seq, channel) in pages that lie in random order among `spare` others, `filler` in all that is no key.

    `token_major` pages lie in memory as (page, slot, head, channel).
    """
    batch, heads, seq, _ = k.shape
    width = -(-seq // page_size)
    table = torch.randperm(batch * width + spare)[: batch * width].view(batch, width)

    def pages(tensor: torch.Tensor) -> torch.Tensor:
        order = (0, 2, 1, 3) if token_major else (0, 1, 2, 3)
        shape = [batch * width + spare, heads, page_size, tensor.shape[3]]
        held = torch.full([shape[i] for i in order], filler, dtype=tensor.dtype, device=tensor.device).permute(order)
        for b in range(batch):
            for i, page in enumerate(table[b].tolist()):
                part = tensor[b, :, i * page_size : (i + 1) * page_size]
                held[page, :, : part.shape[1]] = part
        return held

    lengths = torch.full((batch,), seq, dtype=torch.int32, device=k.device)
    return pages(k), pages(v), table.to(k.device, torch.int32), lengths


def decode_errors(
    case: AttentionProblem,
    blocks: BlockShape | None = None,
    *,
    splits: int | None = None,
    page_size: int | None = None,
    token_major: bool = False,
    device: str = "cpu",
    seed: int = 0,
    with_lse: bool = True,
) -> Errors:
    """Errors of the kernel on a problem against float64; with a page size on the same keys in pages."""
    from flashbench.kernels.flash_decode import flash_decode

    q, k, v = inputs(case, device, seed)
    cache = in_pages(k, v, page_size, token_major=token_major) if page_size else (k, v)
    result = flash_decode(q, *cache, with_lse=with_lse, splits=splits, blocks=blocks, **options_of(case))
    out, lse = result if with_lse else (result, None)
    return errors(case, q, k, v, out, lse)


def decode_values(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dtype: str = "fp32",
    device: str = "cpu",
    lengths: list[int] | None = None,
    page_size: int | None = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Output and LSE for given values, (batch, heads, seq, channel) each."""
    from flashbench.kernels.flash_decode import flash_decode

    tensors = [torch.from_numpy(x).to(device, TORCH_DTYPES[dtype]) for x in (q, k, v)]
    cache: tuple[torch.Tensor | None, ...] = (*tensors[1:], None, None)
    if page_size:
        cache = in_pages(tensors[1], tensors[2], page_size)
    if lengths:
        cache = (*cache[:3], torch.tensor(lengths, dtype=torch.int32, device=device))
        for sequence, length in enumerate(lengths if page_size else ()):
            cache[2][sequence, -(-length // page_size) :] = 2**30  # no page: these entries are never to be followed
    out, lse = flash_decode(tensors[0], *cache, with_lse=True, **options)
    return out.float().cpu().numpy(), lse.cpu().numpy()


def combined(parts: np.ndarray, part_lse: np.ndarray, device: str = "cpu") -> tuple[np.ndarray, np.ndarray]:
    """Output and LSE of (rows, splits, channel) parts and their (rows, splits) natural log-sum-exps, in fp32."""
    from flashbench.kernels.flash_decode_combine import combination, combine_kernel

    held, held_lse = (torch.from_numpy(x).to(device, torch.float32).contiguous() for x in (parts, part_lse))
    out, lse = torch.empty_like(held[:, 0]), torch.empty_like(held_lse[:, 0])
    launch = combination(held, held_lse, out, lse, False)
    combine_kernel[launch.grid](*launch.arguments, **launch.constants)
    return out.cpu().numpy(), lse.cpu().numpy()


def same_bits_twice(case: AttentionProblem, splits: int, device: str = "cpu", times: int = 2) -> bool:
    """Whether calls on the same tensors give the same bits."""
    from flashbench.kernels.flash_decode import flash_decode

    q, k, v = inputs(case, device)
    results = [flash_decode(q, k, v, splits=splits, with_lse=True, **options_of(case)) for _ in range(times)]
    return all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def elements_written_beyond_the_end(
    case: AttentionProblem, blocks: BlockShape | None = None, splits: int | None = None, device: str = "cpu"
) -> int:
    """How many elements were written behind the output, the LSE and the parts of both, which here are the start of larger buffers."""
    from flashbench.kernels import flash_decode

    untouched = -7.0
    q, k, v = inputs(case, device)
    launch = flash_decode.prepare(q, k, v, with_lse=True, splits=splits, blocks=blocks, **options_of(case))
    combine, results = launch.combine, (launch.out, launch.lse, launch.parts, launch.part_lse)
    written = [tensor for tensor in results if tensor is not None]
    buffers = {id(t): torch.full((t.numel() + 4096,), untouched, dtype=t.dtype, device=device) for t in written}

    def with_buffers(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(buffers.get(id(argument), argument) for argument in arguments)

    flash_decode.run(
        launch._replace(
            arguments=with_buffers(launch.arguments),
            combine=combine and combine._replace(arguments=with_buffers(combine.arguments)),
        )
    )
    return sum(int((buffer[-4096:] != untouched).sum()) for buffer in buffers.values())


def launches(case: AttentionProblem, splits: int, device: str = "cpu") -> int:
    """How many kernels a call launches."""
    from flashbench.kernels import flash_decode

    return 1 if flash_decode.prepare(*inputs(case, device), splits=splits, **options_of(case)).combine is None else 2


def counters_left(case: AttentionProblem, splits: int, device: str = "cpu", times: int = 3) -> int:
    """How many counters of a call are not 0 after each of several runs of the same launch."""
    from flashbench.kernels import flash_decode

    launch = flash_decode.prepare(*inputs(case, device), splits=splits, **options_of(case))
    assert launch.counters is not None
    left = 0
    for _ in range(times):
        flash_decode.run(launch)
        left += int(launch.counters.count_nonzero())
    return left
