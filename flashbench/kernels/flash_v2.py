"""FlashAttention-2, forward, in portable Triton: softmax(scale * Q K^T) V without ever storing a score in HBM.

Idea. One program holds a block of queries and walks over the keys. Softmax needs the maximum and the sum of a whole row, which is not
known until the last key; the online softmax (Milakov and Gimelshein, arXiv 1805.02867) keeps a running maximum m and sum l instead,
and when the maximum grows from m to m', everything summed so far is multiplied by alpha = exp(m - m'):

    m' = max(m, max_j s_j)      l' = alpha l + sum_j exp(s_j - m')      o' = alpha o + sum_j exp(s_j - m') v_j      out = o / l

FlashAttention-2 (Dao, arXiv 2307.08691, algorithm 1) fixes the loop order: queries outside, so that programs share nothing and the
sequence is one more axis to run in parallel; o stays unnormalised until one division at the end; and for the backward pass a single
number a row is kept, the log-sum-exp m + log l. Four things here make it quick on the unit that limits it:

- exp(x) is exp2(x log2 e), the form that the hardware has; log2 e is folded into the scale, so that s * c - m is one multiply-add.
- Key blocks that every query of the block sees need no mask; only the diagonal, a window's left edge and the tail do. One loop takes them
  all, the mask in a branch, where the compiler allows it: three loops fill the pipeline three times and spill at the seams.
- What hides a program's copies and its softmax, in the shapes that lead the table on sm_90, is not a pipeline inside it but the other programs
  of its multiprocessor: two to four fit where each has one buffer, for a tile of K and then of V (num_stages 1).
- Where the mask is causal, the longest query blocks start first, so that no long one is left over at the end, and each goes from its
  diagonal down to the first key: the L2 gives up first what came first, and the first keys are those that the short blocks still want.

Cost of one call, for B sequences, H query heads, H_kv key/value heads, N queries, M keys, head dimension d, elements of s bytes:

    FLOPs      4 B H N M d for the two products (half of it causal), and B H N M exponentials
    HBM bytes  s B (2 H N d + 2 H_kv M d) at the least: Q, K, V in, O out; K and V again for each wave of programs that misses the L2
    shared     s (BLOCK_Q + 2 num_stages BLOCK_KV) d per program, or s (BLOCK_Q + BLOCK_KV) d with one stage: 48 KiB at 64 x 128, d = 128, bf16
    registers  o and s in fp32, (d + BLOCK_KV) BLOCK_Q over the threads of a program: 128 a thread at 64 x 128, d = 128, 4 warps
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashbench.kernels.blocks import BlockShape, compiled_figures, default_blocks, family, padded, use_of
from flashbench.kernels.inputs import check_inputs, device_limits, on, product_dtype, visibility
from flashbench.kernels.schedule import assigned, key_ranges, mean_keys, section_count, visible
from flashbench.kernels.tiles import describable, describe, load_rows

LOG2_E = math.log2(math.e)
LEAST_SCALE = 2.0**-126
"""The least normal number of fp32: a smaller scale, which may be 0 there, would make NaN of a hidden score."""
LN_2: tl.constexpr = tl.constexpr(math.log(2))
# Triton compiles anew for an integer that becomes 1 or a multiple of 16; of these nothing would be gained, strides alone shape the loads.
COUNTS = ("batch_heads", "heads_q", "heads_per_kv_head", "seq_q", "seq_kv", "window", "sections")


@triton.jit
def masked(
    s, at_key, key, seq_kv, window, BLOCK_KV: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, NEGATIVE_SCALE: tl.constexpr
):  # fmt: skip
    """Scores of a block of keys, those that a mask hides or that lie behind the last key out of the way: times the scale, a true -inf.

    No score, however low, falls below that. (The scale is never 0: see `scale_in_bits`.)
    """
    seen = visible(at_key, key + tl.arange(0, BLOCK_KV), seq_kv, window, CAUSAL, WINDOW)
    return tl.where(seen, s, float("inf") if NEGATIVE_SCALE else float("-inf"))


# On sm_80 and sm_90 four threads share a row of a product, and each of them has two columns side by side of every eight. Reduced axis by axis in
# that shape, what lies in one thread comes first, in chains beside each other; `max(s, 1)` is one chain. Behind a branch (the mask) the compiler
# keeps no account of who has what, and exchanges it all.


@triton.jit
def share_sums(p):
    """Sums over the keys, one for each of the four threads that share a row, (queries, 4)."""
    return tl.sum(tl.sum(p.reshape(p.shape[0], p.shape[1] // 8, 4, 2), 3), 1)


@triton.jit
def row_extremes(s, NEGATIVE_SCALE: tl.constexpr):
    """The largest score of each row, the smallest if the scale is negative: (queries,)."""
    CHAINS: tl.constexpr = 4 if s.shape[1] >= 32 else 1
    chains = s.reshape(s.shape[0], CHAINS, s.shape[1] // 8 // CHAINS, 4, 2)
    if NEGATIVE_SCALE:
        extreme = tl.min(tl.min(tl.min(tl.min(chains, 2), 1), 2), 1)
    else:
        extreme = tl.max(tl.max(tl.max(tl.max(chains, 2), 1), 2), 1)
    return extreme


@triton.jit(do_not_specialize=COUNTS)
def flash_v2_kernel(
    q, k, v,  # pointers, or tensor descriptors of shape (batch, heads, seq, head dim)
    o, lse,  # pointers to contiguous (batch, heads_q, seq_q, HEAD_DIM_V) and (batch, heads_q, seq_q); lse is None unless WITH_LSE
    q_strides, k_strides, v_strides,  # in elements, in the order batch, head, position, channel
    batch_heads, heads_q, heads_per_kv_head, seq_q, seq_kv, window,
    scale_log2,  # scale * log2(e): scores are in bits from here on
    sections,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr,  # the same, padded to a power of two
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TAIL: tl.constexpr,  # TAIL: the last block of keys is not whole
    NEGATIVE_SCALE: tl.constexpr, WITH_LSE: tl.constexpr, PRECISION: tl.constexpr,
    DESCRIPTORS: tl.constexpr, ONE_LOOP: tl.constexpr,
    DOWN: tl.constexpr,  # from the last block of keys to the first; under a mask only
    QUADS: tl.constexpr,  # four threads share a row of a product: of the matrix units of sm_80 and sm_90
):  # fmt: skip
    head, q_block = assigned(
        tl.program_id(0), batch_heads, tl.cdiv(seq_q, BLOCK_Q), sections, heads_per_kv_head, CAUSAL
    )
    batch = head // heads_q
    head_q = head % heads_q
    head_kv = head_q // heads_per_kv_head
    first_row = q_block * BLOCK_Q
    shift = seq_kv - seq_q  # query i stands at key i + shift, so the last query at the last key
    at_key = shift + first_row + tl.arange(0, BLOCK_Q)

    bounds = key_ranges(
        shift + first_row, shift + tl.minimum(first_row + BLOCK_Q, seq_q) - 1, seq_kv, window, BLOCK_KV, CAUSAL, WINDOW
    )
    q_tile = load_rows(q, q_strides, batch, head_q, first_row, seq_q, HEAD_DIM, BLOCK_Q, D, True, DESCRIPTORS)
    acc = tl.zeros([BLOCK_Q, DV], tl.float32)  # o, unnormalised
    # Without a mask nothing stands between a product and its softmax, and rows can be reduced by what a thread has of them.
    PLAIN: tl.constexpr = QUADS and not (CAUSAL or TAIL)
    total = tl.zeros([BLOCK_Q, 4] if PLAIN else [BLOCK_Q], tl.float32)  # l
    top = tl.full([BLOCK_Q], float("-inf"), tl.float32)  # m, in bits

    v_dtype: tl.constexpr = v.dtype if DESCRIPTORS else v.dtype.element_ty
    # Part 0 is a window's left edge, 1 the steady loop, 2 the diagonal or the tail. Or, with ONE_LOOP, part 0 is all of it.
    # DOWN, from the diagonal on: the first keys, which every block wants, come into the L2 last then.
    TURNED: tl.constexpr = DOWN and not ONE_LOOP
    for part in tl.static_range(2 if TURNED else 0, -1 if TURNED else (1 if ONE_LOOP else 3), -1 if TURNED else 1):
        first = bounds[part]
        end = bounds[3 if ONE_LOOP else part + 1]
        key = first + (tl.cdiv(end - first, BLOCK_KV) - 1) * BLOCK_KV
        for upwards in tl.range(first, end, BLOCK_KV):
            if not DOWN:
                key = upwards
            k_tile = load_rows(k, k_strides, batch, head_kv, key, seq_kv, HEAD_DIM, BLOCK_KV, D, TAIL, DESCRIPTORS)
            s = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)
            if not ONE_LOOP:
                if part != 1:
                    s = masked(s, at_key, key, seq_kv, window, BLOCK_KV, CAUSAL, WINDOW, NEGATIVE_SCALE)
            elif (CAUSAL or TAIL) and ((key < bounds[1]) | (key >= bounds[2])):
                s = masked(s, at_key, key, seq_kv, window, BLOCK_KV, CAUSAL, WINDOW, NEGATIVE_SCALE)
            # The largest scaled score is the scale times the largest score, or the smallest where the scale is negative.
            if PLAIN or (QUADS and part == 1 and not ONE_LOOP):
                extreme = row_extremes(s, NEGATIVE_SCALE)
            else:
                extreme = tl.min(s, 1) if NEGATIVE_SCALE else tl.max(s, 1)
            new_top = tl.maximum(top, extreme * scale_log2)
            origin = new_top
            if (CAUSAL or TAIL) and part != 1:
                origin = tl.where(new_top == float("-inf"), 0.0, new_top)  # no key seen yet: -inf - -inf would be NaN
            p = tl.exp2(s * scale_log2 - origin[:, None])
            alpha = tl.exp2(top - origin)
            total = total * alpha[:, None] + share_sums(p) if PLAIN else total * alpha + tl.sum(p, 1)
            top = new_top
            v_tile = load_rows(v, v_strides, batch, head_kv, key, seq_kv, HEAD_DIM_V, BLOCK_KV, DV, TAIL, DESCRIPTORS)
            acc = tl.dot(p.to(v_dtype), v_tile, acc * alpha[:, None], input_precision=PRECISION)
            if DOWN:
                key -= BLOCK_KV
    if PLAIN:
        total = tl.sum(total, 1)
    # A query that saw no key has total 0 and top -inf: its output is 0, its log-sum-exp -inf.
    divisor = tl.where(total > 0.0, total, 1.0)
    out = acc * (1.0 / divisor)[:, None]
    rows = first_row + tl.arange(0, BLOCK_Q)
    columns = tl.arange(0, DV)
    o_row = head.to(tl.int64) * seq_q + rows
    keep = (rows < seq_q)[:, None]
    if DV != HEAD_DIM_V:
        keep = keep & (columns < HEAD_DIM_V)[None, :]
    tl.store(o + o_row[:, None] * HEAD_DIM_V + columns[None, :], out.to(o.dtype.element_ty), mask=keep)
    if WITH_LSE:
        tl.store(lse + o_row, (top + tl.log2(divisor)) * LN_2, mask=rows < seq_q)


def scale_in_bits(scale: float) -> float:
    """scale * log2(e), and at least LEAST_SCALE in size: to any score up to 2^100 as good as 0, to an infinite one not."""
    size = max(abs(scale) * LOG2_E, LEAST_SCALE)
    return -size if scale < 0 else size


class Launch(NamedTuple):
    """One launch, ready to make: `flash_v2_kernel[grid](*arguments, **constants)` fills out and lse."""

    grid: tuple[int]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    blocks: BlockShape
    out: torch.Tensor
    lse: torch.Tensor | None


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: str = "none",
    scale: float | None = None,
    with_lse: bool = False,
    precision: str = "ieee",
    blocks: BlockShape | None = None,
) -> Launch:
    """The launch for `flash_v2_forward` with the same arguments; allocates its outputs, launches nothing."""
    check_inputs(q, k, v, precision)
    batch, heads_q, seq_q, head_dim = q.shape
    heads_kv, seq_kv, head_dim_v = v.shape[1:]
    causal, window = visibility(mask, seq_kv)
    scale = head_dim**-0.5 if scale is None else scale
    limits = device_limits(q.device)
    readable = describable(q) and describable(k) and describable(v)
    dtype = product_dtype(q, precision)
    row_bytes = (head_dim + head_dim_v) * q.element_size()  # of a key and its value
    if blocks is None:
        blocks = default_blocks(
            limits.capability,
            dtype,
            head_dim,
            head_dim_v,
            limits.shared_bytes,
            descriptors=readable,
            use=use_of(causal, mean_keys(seq_q, seq_kv, window, causal=causal), row_bytes, limits.l2_bytes),
        )
    else:
        blocks = replace(blocks, descriptors=blocks.descriptors and readable)
    d, dv = padded(head_dim), padded(head_dim_v)
    sources: tuple[Any, ...] = (q, k, v)
    if blocks.descriptors:
        sources = (describe(q, blocks.block_q, d), describe(k, blocks.block_kv, d), describe(v, blocks.block_kv, dv))

    tail = seq_kv % blocks.block_kv != 0
    out = torch.empty((batch, heads_q, seq_q, head_dim_v), dtype=v.dtype, device=q.device)
    lse = torch.empty((batch, heads_q, seq_q), dtype=torch.float32, device=q.device) if with_lse else None
    sections = section_count(batch * heads_kv, seq_kv * row_bytes, limits.l2_bytes)
    arguments = (
        *sources, out, lse, q.stride(), k.stride(), v.stride(), batch * heads_q, heads_q,
        heads_q // heads_kv, seq_q, seq_kv, window or 0, scale_in_bits(scale), sections,
    )  # fmt: skip
    constants = {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "D": d,
        "DV": dv,
        "BLOCK_Q": blocks.block_q,
        "BLOCK_KV": blocks.block_kv,
        "CAUSAL": causal,
        "WINDOW": window is not None,
        "TAIL": tail,
        "NEGATIVE_SCALE": scale < 0,
        "WITH_LSE": with_lse,
        "PRECISION": precision,
        "DESCRIPTORS": blocks.descriptors,
        "ONE_LOOP": not (causal or tail) or may_branch(limits.capability, blocks, max(d, dv)),
        "DOWN": causal and family(limits.capability) != "sm_100",  # there it takes 70 registers more
        "QUADS": family(limits.capability) != "sm_100" and dtype != "fp32",
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
        "enable_fp_fusion": True,  # s * c - m in one instruction; Triton 3.10 no longer does so unasked
    }
    grid = (batch * heads_q * -(-seq_q // blocks.block_q),)
    return Launch(grid, arguments, constants, blocks, out, lse)


def may_branch(capability: tuple[int, int] | None, blocks: BlockShape, width: int) -> bool:
    """Whether the compiler keeps the products of a loop as they are around a branch, of which the mask is one; `width` of the tiles.

    Not for mma.sync, sm_80's: it no longer sees that the first product feeds the second, and takes the weights through shared memory. Nor
    for two warpgroups at head dimension 256: the assembler makes their products wait for one another. On sm_100 this was never timed.
    """
    return family(capability) in ("sm_90", "interpreter") and not (width >= 256 and blocks.num_warps >= 8)


def flash_v2_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: str = "none",
    scale: float | None = None,
    with_lse: bool = False,
    precision: str = "ieee",
    blocks: BlockShape | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale Q K^T) V for q (B, Hq, Sq, D), k (B, Hkv, Skv, D), v (B, Hkv, Skv, Dv): (B, Hq, Sq, Dv), contiguous, in their dtype.

    Query head h reads key/value head h // (Hq / Hkv). Masks (`none`, `causal`, `window:W`) are aligned bottom-right: the last query sees
    the last key, and a window the last W keys, itself included. A query that sees no key gives 0. Tensors may have any strides, and
    head dimensions up to 256; the scale, by default D^-1/2, any sign. `precision` says how fp32 tensors are multiplied, exactly (ieee)
    or as tf32. With `with_lse` the natural logarithm of each row's sum of exponentials comes too, (B, Hq, Sq) in fp32, -inf where no key
    was seen. Not differentiable. Raises UsageError for inputs that do not fit together or that the kernel does not take.
    """
    launch = prepare(q, k, v, mask=mask, scale=scale, with_lse=with_lse, precision=precision, blocks=blocks)
    run(launch)
    return launch.out if launch.lse is None else (launch.out, launch.lse)


def run(launch: Launch) -> Any:
    """Make the launch, on its tensors' device; gives Triton's compiled kernel, or None from the interpreter."""
    with on(launch.out.device):
        return flash_v2_kernel[launch.grid](*launch.arguments, **launch.constants)


def launch_figures(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> dict[str, Any]:
    """Block shape and direction, registers, spills and shared memory of the kernel that `flash_v2_forward(q, k, v, **options)` runs; runs
    it once."""
    launch = prepare(q, k, v, **options)
    return {**compiled_figures(launch.blocks, run(launch)), "walks_down": launch.constants["DOWN"]}
