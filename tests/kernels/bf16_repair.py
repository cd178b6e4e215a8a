"""Triton's interpreter, given a bf16 that computes: for tests only.

NumPy has no bf16, so the interpreter keeps the 16 bits as an unsigned integer, multiplies them as integers in `tl.dot`, and drops the
low half of an fp32 where it should round (seen in Triton 3.6, 3.8 and 3.9; triton-lang/triton #11584). With the two operations replaced,
a kernel's bf16 arithmetic in the interpreter is what the GPU does: exact products, fp32 sums, rounding to the nearest even.
"""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def bits_to_float(bits: np.ndarray) -> np.ndarray:
    """A bf16 is the upper half of the fp32 of the same value."""
    return np.left_shift(bits.astype(np.uint32), 16).view(np.float32)


def float_to_bits(values: np.ndarray) -> np.ndarray:
    """The nearest bf16, ties to even: add just under half a unit, one more where the last kept bit is odd, and cut."""
    whole = np.array(values, dtype=np.float32).view(np.uint32)
    odd = np.right_shift(whole, 16) & np.uint32(1)
    nearest = np.right_shift(whole + np.uint32(0x7FFF) + odd, 16).astype(np.uint16)
    nearest[np.isnan(values)] = 0x7FC0
    return nearest


def repair() -> None:
    """Replace `tl.dot` of bf16 operands and the cast from fp32 to bf16, in this process."""
    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def dot_in_fp32(self, a, b, accumulator, *options):
        if a.dtype.scalar != tl.bfloat16:
            return dot(self, a, b, accumulator, *options)
        total = accumulator.data + bits_to_float(a.data) @ bits_to_float(b.data)
        return TensorHandle(total.astype(accumulator.data.dtype), accumulator.dtype.scalar)

    def cast_rounding(self, source, target):
        if (source.dtype.scalar, target.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, target)
        return TensorHandle(float_to_bits(source.data), tl.bfloat16)

    InterpreterBuilder.create_dot = dot_in_fp32
    InterpreterBuilder.cast_impl = cast_rounding
