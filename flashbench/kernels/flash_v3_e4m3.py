"""What flash-v3's consumers do otherwise for e4m3 tensors: weights in 8 bits, and scores and outputs in units of their own.

By itself: 8-bit weights ask for what 16-bit ones get for nothing. Of every 32 keys, a thread has the scores of keys 8 i + 2 t + {0, 1}, t its number
modulo 4, and as an operand of the next product it holds places 16 h + 4 t + {0, 1, 2, 3}. But what is summed over the keys does not ask for their
order: key 16 h + 8 l + 2 t + b goes to place 16 h + 4 t + 2 l + b, here by name alone, and in V once and for all (flash_v3_fp8.py). No shuffle is left,
where FlashAttention-3 permutes bytes. From block to block weights go as words of four, since bytes would take a register each.

Sources: the PTX ISA on wgmma's fragments and on cvt; FlashAttention-3 (arXiv 2407.08608), section 3.3, and hopper/softmax.h for LIFT.
"""

from __future__ import annotations

from flashbench.kernels.flash_v3_queue import BATCH, HEAD, told
from flashbench.kernels.gluon_names import gl, gluon

LIFT: gl.constexpr = gl.constexpr(7.0)
"""log2 of the weight of a score that is the running maximum, where e4m3 ends at 448: small weights keep 7 bits more."""
LEAST_BITS: gl.constexpr = gl.constexpr(1e-30)
"""The least scale of a score, instead of 0: 0 times a hidden score, minus infinity, is no number."""


@gluon.jit
def word_of(a, b, c, d):
    """Four numbers in e4m3, the first in the lowest byte; beyond 448 they are 448."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1; cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi}; }",
        "=r,f,f,f,f", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def packed(weights):
    """Weights (queries, keys) in words of four that lie side by side as an operand: (queries, keys / 4) int32."""
    rows: gl.constexpr = weights.shape[0]
    keys: gl.constexpr = weights.shape[1]
    by_place = weights.reshape([rows, keys // 32, 2, 2, 4, 2]).permute((0, 1, 2, 4, 3, 5))  # h, t, l, b
    first, second = gl.split(by_place.reshape([rows, keys // 4, 2, 2]))
    w0, w2 = gl.split(first)
    w1, w3 = gl.split(second)
    return word_of(w0, w1, w2, w3)


@gluon.jit
def unpacked(words, p_layout: gl.constexpr):
    """The words as the product's first operand; nothing moves, and no instruction is left of it."""
    first = gl.join(words.to(gl.int8), (words >> 16).to(gl.int8))
    second = gl.join((words >> 8).to(gl.int8), (words >> 24).to(gl.int8))
    p = gl.join(first, second).reshape([words.shape[0], words.shape[1] * 4])
    return gl.convert_layout(p.to(gl.float8e4nv, bitcast=True), p_layout, assert_trivial=True)


@gluon.jit
def descale(descales, told_tiles, turn, heads_q, heads_per_kv_head, WHICH: gl.constexpr, there):
    """What one unit of Q (WHICH 0), K (1) or V (2) stands for in the head of tile `turn`; 1 if no tile is `there`."""
    head = told(told_tiles, turn, BATCH) * heads_q + told(told_tiles, turn, HEAD)
    return gl.load(descales + head // heads_per_kv_head * 3 + WHICH, mask=there, other=1.0)


@gluon.jit
def score_scale(
    descales, told_tiles, turn, heads_q, heads_per_kv_head, scale_log2, NEGATIVE_SCALE: gl.constexpr, there
):  # fmt: skip
    """What makes bits of a score of tile `turn`, as the product of Q's and K's units gives it."""
    of_q = descale(descales, told_tiles, turn, heads_q, heads_per_kv_head, 0, there)
    of_k = descale(descales, told_tiles, turn, heads_q, heads_per_kv_head, 1, there)
    scale = scale_log2 * of_q * of_k
    return gl.minimum(scale, -LEAST_BITS) if NEGATIVE_SCALE else gl.maximum(scale, LEAST_BITS)
