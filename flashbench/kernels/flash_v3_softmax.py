"""The softmax of flash-v3's consumers: from a block of scores to the weights that the next product takes, beside products under way.

Source: FlashAttention-3 (arXiv 2407.08608), sections 2.2 and 3.2; the numbers are those of flash_v2.py.
"""

from __future__ import annotations

from flashbench.kernels.flash_v3_e4m3 import LIFT, packed
from flashbench.kernels.flash_v3_schedule import visible
from flashbench.kernels.gluon_names import gl, gluon

SLACK: gl.constexpr = gl.constexpr(8.0)
"""Bits by which a score may pass the running maximum before that follows: weights are at most 2^SLACK, and keep all their digits."""
E4M3_SLACK: gl.constexpr = gl.constexpr(1.75)
"""The same for e4m3: 2^(LIFT + E4M3_SLACK) is 431, just under its end."""


@gluon.constexpr_function
def rows_of(layout):
    """The layout of one number for each row of a matrix."""
    return gl.SliceLayout(1, layout)


# In the accumulator of a product a thread has columns 8 i + 2 (thread % 4) and the next one (see `visible`). Reduced axis by axis, what lies in
# one thread needs no shuffle, and many short chains run beside each other where `max(s, 1)` is one, each step of which waits for the last.


@gluon.jit
def share_sums(p):
    """Sums over the keys, one for each of the four threads that share a row, (queries, 4): as far as a thread gets by itself.

    What a row adds up to is asked for once, at the end.
    """
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def row_extremes(s, NEGATIVE_SCALE: gl.constexpr):
    """The largest score of each row, the smallest if the scale is negative: (queries,)."""
    chains = s.reshape([s.shape[0], 4, s.shape[1] // 32, 4, 2])  # of the columns that thread % 4 (axis 3) has
    if NEGATIVE_SCALE:
        extreme = gl.min(gl.min(gl.min(gl.min(chains, 2), 1), 2), 1)
    else:
        extreme = gl.max(gl.max(gl.max(gl.max(chains, 2), 1), 2), 1)
    return gl.convert_layout(extreme, rows_of(s.type.layout))


@gluon.jit
def hidden(
    s, at_key, column, seq_kv, window, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, NEGATIVE_SCALE: gl.constexpr
):  # fmt: skip
    """Scores of a block of keys with those that a mask hides, or that lie behind the last key, out of the way: times the scale, -inf."""
    return gl.where(
        visible(at_key, column, seq_kv, window, CAUSAL, WINDOW), s, float("inf") if NEGATIVE_SCALE else float("-inf")
    )


@gluon.jit
def maxima(
    s,
    top,
    scale_log2,
    MASKED: gl.constexpr,
    NEGATIVE_SCALE: gl.constexpr,
    LAZY_RESCALE: gl.constexpr,
    FP8: gl.constexpr,
):
    """What the running maximum becomes with a block of scores: (origin of the block's weights, alpha, m)."""
    new_top = gl.maximum(top, row_extremes(s, NEGATIVE_SCALE) * scale_log2)
    if LAZY_RESCALE:
        slack: gl.constexpr = E4M3_SLACK if FP8 else SLACK
        new_top = gl.where(new_top > top + slack, new_top, top)
    origin = new_top
    if MASKED:
        origin = gl.where(new_top == float("-inf"), 0.0, new_top)  # no key seen yet: -inf - -inf would be NaN
    return origin, gl.exp2(top - origin), new_top


@gluon.jit
def weights_of(s, origin, alpha, total, scale_log2, FP8: gl.constexpr):
    """Weights of a block of scores, and what the running sums become: (p, l). As in flash_v2.py, but that l is kept as what each of a row's
    four threads has added up (share_sums), and that for e4m3 both are 2^LIFT times as large."""
    lifted = origin - LIFT if FP8 else origin
    p = gl.exp2(s * scale_log2 - lifted[:, None])
    of_shares = gl.convert_layout(alpha, rows_of(total.type.layout))
    return p, total * of_shares[:, None] + share_sums(p)


@gluon.jit
def hidden_where_cut(
    s, block, diagonal, steady, at_key, column, seq_kv, window,
    BLOCK_KV: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, NEGATIVE_SCALE: gl.constexpr,
):  # fmt: skip
    """`hidden` for a block that the diagonal or a window's left edge cuts: a branch that most blocks jump over."""
    if CAUSAL:  # noqa: SIM102 - a constant for the compiler, as the second is not
        if (block >= diagonal) | (block < steady):
            first_key = block * BLOCK_KV
            s = hidden(s, at_key - first_key, column, seq_kv - first_key, window, CAUSAL, WINDOW, NEGATIVE_SCALE)
    return s


@gluon.jit
def as_operand(weights, LAYOUT: gl.constexpr, ELEMENT: gl.constexpr):
    """Weights in the registers of the next product's first operand, as they go from step to step; e4m3 in words of four."""
    FP8: gl.constexpr = gl.float8e4nv == ELEMENT
    return packed(weights) if FP8 else gl.convert_layout(weights.to(ELEMENT), LAYOUT)


@gluon.constexpr_function
def multiplication_text(count):
    # In the accumulator of a product a thread has two rows: two columns of the one, two of the other, and so on.
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count))
    rows = (2 * count, 2 * count + 2)
    differs = "setp.neu.f32 p, ${}, 0f3F800000; setp.neu.or.f32 p, ${}, 0f3F800000, p;".format(*rows)
    return f"{{ .reg .pred p; {differs} vote.sync.any.pred p, p, 0xffffffff; @!p bra DONE; {products} DONE: }}"


@gluon.constexpr_function
def multiplication_operands(count):
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def multiplied_unless_1(acc, factors):
    """The sums of a product times factors that are the same along each row; a warp jumps over it if all of its factors are 1."""
    COUNT: gl.constexpr = acc.shape[0] * acc.shape[1] // 128
    TEXT: gl.constexpr = multiplication_text(COUNT)
    OPERANDS: gl.constexpr = multiplication_operands(COUNT)
    return gl.inline_asm_elementwise(TEXT, OPERANDS, [acc, factors], dtype=gl.float32, is_pure=False, pack=COUNT)


@gluon.jit
def rescaled(acc, alpha, LAZY_RESCALE: gl.constexpr):
    """What was summed up so far, in units of the new maximum: a factor for each row."""
    factors = gl.convert_layout(alpha, rows_of(acc.type.layout))[:, None]
    if LAZY_RESCALE:
        return multiplied_unless_1(acc, factors)
    return acc * factors
