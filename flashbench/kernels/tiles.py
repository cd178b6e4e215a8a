"""Tiles of a (batch, heads, seq, channel) tensor: through a tensor descriptor (TMA, sm_90 and later) or through plain pointers.

A descriptor lets one thread ask the copy engine for a whole tile: no address arithmetic, no registers, bounds checked by the hardware.
It wants 16-byte aligned strides and contiguous channels; everything else goes through pointers, and the kernels do not see which.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def load_rows(
    source, strides, batch, head, row, row_count,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHECK_ROWS: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Tile (ROWS, COLUMNS) from `row` on. Channels beyond CHANNELS read as 0, and so do rows beyond `row_count` if CHECK_ROWS.

    Rows that do not exist must not be read even where their weight is 0: 0 times a stray NaN is NaN.
    """
    if DESCRIPTOR:
        tile = source.load([batch, head, row, 0]).reshape(ROWS, COLUMNS)
    else:
        # 64-bit before the first product: batch * stride passes 2^31 elements in tensors that fit the card.
        corner = (
            source
            + tl.cast(batch, tl.int64) * strides[0]
            + tl.cast(head, tl.int64) * strides[1]
            + tl.cast(row, tl.int64) * strides[2]
        )
        n = tl.arange(0, ROWS)
        d = tl.arange(0, COLUMNS)
        pointers = corner + (n.to(tl.int64)[:, None] * strides[2] + d.to(tl.int64)[None, :] * strides[3])
        if CHECK_ROWS and COLUMNS != CHANNELS:
            tile = tl.load(pointers, mask=(row + n < row_count)[:, None] & (d < CHANNELS)[None, :], other=0.0)
        elif CHECK_ROWS:
            tile = tl.load(pointers, mask=(row + n < row_count)[:, None], other=0.0)
        elif COLUMNS != CHANNELS:
            tile = tl.load(pointers, mask=(d < CHANNELS)[None, :], other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


def describable(tensor: torch.Tensor) -> bool:
    """Whether the copy engine can read `tensor` (batch, heads, seq, channel) as it lies (CUDA driver API, cuTensorMapEncodeTiled)."""
    size = tensor.element_size()
    if tensor.stride(3) != 1 or tensor.data_ptr() % 16:
        return False
    # A stride of 0 (an expanded tensor) repeats memory, which the engine is not promised to do.
    return all(
        n == 1 or (step > 0 and step * size % 16 == 0)
        for n, step in zip(tensor.shape[:3], tensor.stride(), strict=False)
    )


def describe(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor whose loads bring tiles (1, 1, rows, columns); out of bounds they read 0. Needs `describable(tensor)`."""
    # The stride of an axis of length 1 means nothing and need not be aligned; any aligned one will do.
    strides = [step if n > 1 else 16 for n, step in zip(tensor.shape[:3], tensor.stride(), strict=False)]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], [1, 1, rows, columns])
