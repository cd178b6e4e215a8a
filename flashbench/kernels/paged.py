"""Tiles of a paged cache: keys lie in pages of a fixed number, anywhere in one large buffer, and a table says where (PagedAttention).

Pages are (page, head, slot, channel), of any strides, so that a token-major cache is a transposed view. Key n of a sequence lies in slot
n % page_size of the page that entry n // page_size of the sequence's row of the table names.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashbench.errors import UsageError
from flashbench.kernels.inputs import check_inputs
from flashbench.kernels.tiles import load_rows


@triton.jit
def pages_of(table, row, row_count, ROWS: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """The pages of ROWS keys from `row` on: one number where a tile lies in one page, else one for each key; `table` is the sequence's row."""
    if PAGE_SIZE % ROWS == 0:
        page = tl.load(table + row // PAGE_SIZE)
    else:
        at = row + tl.arange(0, ROWS)
        # An entry behind the last key may not exist, and what it says may be no page.
        page = tl.load(table + at // PAGE_SIZE, mask=at < row_count, other=0)
    return page


@triton.jit
def load_paged_rows(
    pages, strides, page, head, row, row_count,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Tile (ROWS, COLUMNS) from key `row` on, which lie in `page` (of `pages_of`); keys from `row_count` on and padding read as 0."""
    if PAGE_SIZE % ROWS == 0:
        slot = row % PAGE_SIZE
        end = slot + row_count - row
        tile = load_rows(pages, strides, page, head, slot, end, CHANNELS, ROWS, COLUMNS, True, False)
    else:
        at = row + tl.arange(0, ROWS)
        d = tl.arange(0, COLUMNS)
        # 64-bit before the first product: a cache of many pages has more than 2^31 elements.
        start = page.to(tl.int64) * strides[0] + (at % PAGE_SIZE).to(tl.int64) * strides[2]
        corner = pages + tl.cast(head, tl.int64) * strides[1]
        there = (at < row_count)[:, None]
        if COLUMNS != CHANNELS:
            there = there & (d < CHANNELS)[None, :]
        tile = tl.load(corner + (start[:, None] + d.to(tl.int64)[None, :] * strides[3]), mask=there, other=0.0)
    return tile


def check_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_table: torch.Tensor | None,
    lengths: torch.Tensor | None,
    precision: str,
) -> None:
    """UsageError unless q can attend to the cache; what the table and the lengths hold is not looked at, which would mean to wait for it."""
    if page_table is None:
        check_inputs(q, k, v, precision)
    else:
        if not (q.ndim == k.ndim == v.ndim == 4):
            raise UsageError("q must be (batch, heads, seq, head_dim), k and v (pages, heads, page size, head_dim)")
        if k.shape[0] != v.shape[0] or k.shape[0] < 1:
            raise UsageError(f"k has {k.shape[0]} pages and v {v.shape[0]}; a table names the pages of both")
        # Any one page is to the batch what keys and values of its length are.
        one_k, one_v = (pages[:1].expand(q.shape[0], -1, -1, -1) for pages in (k, v))
        check_inputs(q, one_k, one_v, precision)
        _check_index("page_table", page_table, (q.shape[0], page_table.shape[-1] if page_table.ndim else 0), q)
    if lengths is not None:
        _check_index("lengths", lengths, (q.shape[0],), q)


def _check_index(name: str, index: torch.Tensor, shape: tuple[int, ...], q: torch.Tensor) -> None:
    if tuple(index.shape) != shape or 0 in shape or index.dtype != torch.int32 or not index.is_contiguous():
        wanted = "(batch, pages of a sequence)" if name == "page_table" else "(batch,)"
        raise UsageError(
            f"{name} must be contiguous int32 {wanted} for a batch of {q.shape[0]}; it is {index.dtype} {tuple(index.shape)}"
        )
    if index.device != q.device:
        raise UsageError(f"{name} lies on {index.device} and q on {q.device}; move them to one device")
