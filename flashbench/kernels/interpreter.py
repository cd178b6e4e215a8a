"""What Triton's interpreter (TRITON_INTERPRET=1, kernels on CPU tensors) gets wrong, asked of the interpreter itself."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl


@triton.jit
def square_kernel(matrix, product, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tile = tl.load(matrix + at)
    tl.store(product + at, tl.dot(tile, tile))


@functools.cache
def bf16_works() -> bool:
    """Whether `tl.dot` of bf16 is right here, from a product of small integers. In 3.6 to 3.9 the interpreter multiplies the raw bits
    (triton-lang/triton #11584), so that a right kernel seems to be wrong: a case to leave out, not to report.
    """
    matrix = (torch.arange(256) % 7 - 3).reshape(16, 16)
    product = torch.empty(16, 16)
    square_kernel[(1,)](matrix.to(torch.bfloat16), product, N=16)
    return bool(torch.equal(product.long(), matrix @ matrix))
