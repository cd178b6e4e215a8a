"""Flash-Decoding in portable Triton: few queries against a long cache of keys and values, contiguous or in pages.

Idea. To decode a token is to read the whole cache for one query: 2 group FLOPs a byte in bf16, where the card would compute hundreds in
the time of that byte. Nothing counts but the memory's bandwidth, and for that two things are needed, which a forward kernel has not.

- Enough programs. A forward kernel gives one to each block of queries, and here is one query: batch x heads programs, often fewer than
  multiprocessors. Flash-Decoding (Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context inference", 2023) cuts the keys into
  splits as well. Each runs the online softmax of FlashAttention-2 (arXiv 2307.08691, algorithm 1; written out in flash_v2.py) over its
  own keys, and the last of them to end, or a second kernel, adds up the parts (flash_decode_combine.py). As many splits as fill the device
  once or twice (splits.py); one split writes the output itself.
- Each byte once. The query heads of a group share their key/value head, so their rows, for all queries, are packed into one tile: K and V
  come once for the group, and the matrix unit, whose tile has at least 16 rows, works on rows that count (FlashInfer, arXiv 2501.01005,
  section 3.2, packs them alike; the order here is query by query, heads inside, so that a tile's rows stand at neighbouring keys).

Two more choices. Bytes under way, not arithmetic, are what a multiprocessor must have enough of: to hide a microsecond at 4 TB/s over 132
of them takes 32 KiB each, and twice that leaves the memory busy while the last programs finish. Hence 4 warps, few keys a tile and a deep
pipeline, two programs or more on a multiprocessor. And one loop that masks every tile, without a branch around the mask: the comparison is
free under the loads.

Cost of one call, for B sequences of M keys, N queries, H query heads, H_kv key/value heads, head dimension d, elements of s bytes, S splits:

    FLOPs      4 B H N M d for the two products, and B H N M exponentials
    HBM bytes  s B (2 H_kv M d + 2 H N d): the cache once, Q in, O out; parts of 8 S B H N (d + 1) bytes stay in the L2
    shared     num_stages BLOCK_KV 2 d s per program: 96 KiB at 64 keys, d = 128, 3 stages, bf16
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from flashbench.errors import UsageError
from flashbench.kernels.blocks import BlockShape, compiled_figures, default_blocks, padded
from flashbench.kernels.counters import next_counters
from flashbench.kernels.flash_decode_combine import (
    FUSED_BYTES,
    Combination,
    add_up,
    combination,
    combine_kernel,
    is_last,
    tile_of_parts,
)
from flashbench.kernels.inputs import device_limits, on, product_dtype, sm_count, visibility
from flashbench.kernels.paged import check_cache, load_paged_rows, pages_of
from flashbench.kernels.schedule import key_ranges, visible
from flashbench.kernels.splits import MAX_ROWS, decode_shared_bytes, split_count, tallest_shared_bytes
from flashbench.kernels.tiles import describable, describe, load_rows
from flashbench.model.schedule import programs_per_sm

KERNEL = "flash-decode"
LOG2_E = math.log2(math.e)
LN_2: tl.constexpr = tl.constexpr(math.log(2))
COUNTS = ("table_width", "heads_kv", "group", "seq_q", "seq_kv", "window", "splits", "row_blocks")


@triton.jit
def output_row(row, batch, head_kv, heads_kv, group, seq_q):
    """Where row `row` of a group, head row % group of query row // group, stands among the (batch, heads_q, seq_q) of the output."""
    return (tl.cast(batch, tl.int64) * heads_kv * group + head_kv * group + row % group) * seq_q + row // group


@triton.jit(do_not_specialize=COUNTS)
def flash_decode_kernel(
    q, k, v,  # pointers; k and v may be tensor descriptors of shape (batch, heads, seq, head dim)
    o, lse,  # pointers to contiguous (batch, heads_q, seq_q, HEAD_DIM_V) and (batch, heads_q, seq_q); lse may be None
    parts, part_lse,  # the same with an axis `splits` behind seq_q, fp32; None if there is one split
    counters,  # pointer to a 0 for each block of rows whose parts are added up here; None unless SPLITS
    q_strides, k_strides, v_strides,  # in elements, in the order batch (of pages: page), head, position, channel
    page_table, lengths,  # pointers to contiguous (batch, table_width) and (batch,) int32; None unless PAGE_SIZE, LENGTHS
    table_width, heads_kv, group, seq_q, seq_kv, window, splits, row_blocks,
    scale_log2,  # scale * log2(e): scores are in bits from here on
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr,  # the same, padded to a power of two
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TAIL: tl.constexpr,
    LENGTHS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIPTORS: tl.constexpr,
    ROWS: tl.constexpr, SPLITS: tl.constexpr,  # of the parts that are added up here at a time; 0 if none are
    PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row_block = program % row_blocks
    split = program // row_blocks % splits
    sequence_head = program // row_blocks // splits
    batch = sequence_head // heads_kv
    head_kv = sequence_head % heads_kv

    # Row r of a group is head r % group of query r // group.
    row = row_block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    row_count = group * seq_q
    last_row = tl.minimum((row_block + 1) * BLOCK_Q, row_count) - 1
    query = row // group
    head_q = head_kv * group + row % group
    length = seq_kv
    if LENGTHS:
        length = tl.minimum(tl.load(lengths + batch), seq_kv)
    shift = length - seq_q  # query i stands at key i + shift
    low, _, _, high = key_ranges(
        shift + row_block * BLOCK_Q // group, shift + last_row // group, length, window, BLOCK_KV, CAUSAL, WINDOW
    )
    blocks = tl.cdiv(high - low, BLOCK_KV)
    first = low + split * blocks // splits * BLOCK_KV
    end = tl.minimum(low + (split + 1) * blocks // splits * BLOCK_KV, high)

    column = tl.arange(0, D)
    q_row = (
        tl.cast(batch, tl.int64) * q_strides[0] + head_q.to(tl.int64) * q_strides[1] + query.to(tl.int64) * q_strides[2]
    )
    q_there = (row < row_count)[:, None]
    if D != HEAD_DIM:
        q_there = q_there & (column < HEAD_DIM)[None, :]
    q_tile = tl.load(q + (q_row[:, None] + column.to(tl.int64)[None, :] * q_strides[3]), mask=q_there, other=0.0)

    acc = tl.zeros([BLOCK_Q, DV], tl.float32)  # o, unnormalised
    total = tl.zeros([BLOCK_Q], tl.float32)  # l
    top = tl.full([BLOCK_Q], float("-inf"), tl.float32)  # m, in bits
    if PAGE_SIZE > 0:
        page_table += tl.cast(batch, tl.int64) * table_width
    for key in tl.range(first, end, BLOCK_KV):
        if PAGE_SIZE > 0:
            page = pages_of(page_table, key, length, BLOCK_KV, PAGE_SIZE)
            k_tile = load_paged_rows(k, k_strides, page, head_kv, key, length, HEAD_DIM, BLOCK_KV, D, PAGE_SIZE)
        else:
            k_tile = load_rows(k, k_strides, batch, head_kv, key, length, HEAD_DIM, BLOCK_KV, D, TAIL, DESCRIPTORS)
        s = tl.dot(q_tile, k_tile.T, input_precision=PRECISION) * scale_log2
        if CAUSAL or TAIL:
            # Masked after scaling, by a true -inf: no score, however low and whatever the sign of the scale, falls below it.
            seen = visible(query + shift, key + tl.arange(0, BLOCK_KV), length, window, CAUSAL, WINDOW)
            s = tl.where(seen, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        origin = tl.where(new_top == float("-inf"), 0.0, new_top)  # no key seen yet: -inf - -inf would be NaN
        p = tl.exp2(s - origin[:, None])
        alpha = tl.exp2(top - origin)
        if PAGE_SIZE > 0:
            v_tile = load_paged_rows(v, v_strides, page, head_kv, key, length, HEAD_DIM_V, BLOCK_KV, DV, PAGE_SIZE)
        else:
            v_tile = load_rows(v, v_strides, batch, head_kv, key, length, HEAD_DIM_V, BLOCK_KV, DV, TAIL, DESCRIPTORS)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=PRECISION)
        total = total * alpha + tl.sum(p, 1)
        top = new_top
    if PDL:
        gdc_launch_dependents()

    # A row that saw no key, as in a split beyond the end of a sequence, has total 0 and top -inf: its part is 0, its log-sum-exp -inf.
    divisor = tl.where(total > 0.0, total, 1.0)
    out = acc * (1.0 / divisor)[:, None]
    out_lse = (top + tl.log2(divisor)) * LN_2
    out_row = output_row(row, batch, head_kv, heads_kv, group, seq_q)
    column_v = tl.arange(0, DV)
    keep = (row < row_count)[:, None]
    if DV != HEAD_DIM_V:
        keep = keep & (column_v < HEAD_DIM_V)[None, :]
    if parts is None:
        tl.store(o + out_row[:, None] * HEAD_DIM_V + column_v[None, :], out.to(o.dtype.element_ty), mask=keep)
        if lse is not None:
            tl.store(lse + out_row, out_lse, mask=row < row_count)
    else:
        part = out_row * splits + split
        tl.store(parts + part[:, None] * HEAD_DIM_V + column_v[None, :], out, mask=keep)
        tl.store(part_lse + part, out_lse, mask=row < row_count)
        if SPLITS > 0 and is_last(counters + sequence_head * row_blocks + row_block, splits):
            for first_row in range(row_block * BLOCK_Q, last_row + 1, ROWS):
                few = first_row + tl.arange(0, ROWS)
                few_rows = output_row(few, batch, head_kv, heads_kv, group, seq_q)
                add_up(parts, part_lse, o, lse, few_rows, few < row_count, splits, HEAD_DIM_V, DV, ROWS, SPLITS)


class Launch(NamedTuple):
    """One call, ready to make: the kernel over the splits and, where that does not add up its parts itself, `combine_kernel`."""

    grid: tuple[int]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    combine: Combination | None
    blocks: BlockShape
    splits: int
    out: torch.Tensor
    lse: torch.Tensor | None
    parts: torch.Tensor | None
    part_lse: torch.Tensor | None
    counters: torch.Tensor | None


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_table: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    *,
    mask: str = "none",
    scale: float | None = None,
    with_lse: bool = False,
    precision: str = "ieee",
    splits: int | None = None,
    blocks: BlockShape | None = None,
) -> Launch:
    """The launches for `flash_decode` with the same arguments; allocates its outputs, launches nothing, waits for nothing."""
    check_cache(q, k, v, page_table, lengths, precision)
    batch, heads_q, seq_q, head_dim = q.shape
    _, heads_kv, rows_kv, head_dim_v = v.shape
    group = heads_q // heads_kv
    table_width = page_table.shape[1] if page_table is not None else 0
    seq_kv = table_width * rows_kv if page_table is not None else rows_kv
    causal, window = visibility(mask, seq_kv)
    # One query sees every key, causal or not; lengths of their own hide the same keys in either case.
    causal = causal and (seq_q > 1 or window is not None)
    scale = head_dim**-0.5 if scale is None else scale
    limits = device_limits(q.device)
    dtype = product_dtype(q, precision)
    # The copy engine fills up with zeros behind the end of a tensor, not behind that of a sequence inside it.
    readable = page_table is None and lengths is None and describable(k) and describable(v)
    if blocks is None:
        blocks = default_blocks(
            limits.capability, dtype, head_dim, head_dim_v, limits.shared_bytes,
            descriptors=readable, kernel=KERNEL, need=tallest_shared_bytes,
        )  # fmt: skip
    rows = group * seq_q
    blocks = replace(
        blocks,
        block_q=max(16, min(MAX_ROWS, 1 << (rows - 1).bit_length())),
        descriptors=blocks.descriptors and readable,
    )
    row_blocks = -(-rows // blocks.block_q)
    if splits is None:
        need = decode_shared_bytes(blocks, limits.capability, dtype, head_dim, head_dim_v)
        slots = sm_count(q.device) * programs_per_sm(need, limits.shared_bytes, blocks.num_warps)
        reach = seq_kv if window is None else min(seq_kv, window + seq_q - 1)
        splits = split_count(batch * heads_kv * row_blocks, reach, blocks.block_kv, slots)
    elif splits < 1:
        raise UsageError(f"splits must be at least 1, not {splits}")
    d, dv = padded(head_dim), padded(head_dim_v)
    sources: tuple[Any, ...] = (q, k, v)
    if blocks.descriptors:
        sources = (q, describe(k, blocks.block_kv, d), describe(v, blocks.block_kv, dv))

    fp32 = {"dtype": torch.float32, "device": q.device}
    out = torch.empty((batch, heads_q, seq_q, head_dim_v), dtype=v.dtype, device=q.device)
    lse = torch.empty((batch, heads_q, seq_q), **fp32) if with_lse else None
    parts = part_lse = counters = combine = None
    rows_at_once = splits_at_once = 0
    pdl = False
    if splits > 1:
        parts = torch.empty((*out.shape[:3], splits, head_dim_v), **fp32)
        part_lse = torch.empty((*out.shape[:3], splits), **fp32)
        if 4 * min(rows, blocks.block_q) * splits * head_dim_v <= FUSED_BYTES:
            counters = next_counters(q.device, batch * heads_kv * row_blocks)
            rows_at_once, splits_at_once = tile_of_parts(min(rows, blocks.block_q), dv)
        else:
            pdl = limits.capability is not None and limits.capability >= (9, 0)
            combine = combination(parts, part_lse, out, lse, pdl)
    arguments = (
        *sources, out, lse, parts, part_lse, counters, q.stride(), k.stride(), v.stride(), page_table, lengths,
        table_width, heads_kv, group, seq_q, seq_kv, window or 0, splits, row_blocks, scale * LOG2_E,
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
        "TAIL": lengths is not None or seq_kv % blocks.block_kv != 0,
        "LENGTHS": lengths is not None,
        "PAGE_SIZE": rows_kv if page_table is not None else 0,
        "PRECISION": precision,
        "DESCRIPTORS": blocks.descriptors,
        "ROWS": rows_at_once,
        "SPLITS": splits_at_once,
        "PDL": pdl,
        "num_warps": blocks.num_warps,
        # The number of a page is loaded before the page, which takes the pipeline as many stages again.
        "num_stages": blocks.num_stages if page_table is None else 2 * blocks.num_stages - 1,
        "enable_fp_fusion": True,  # Triton 3.10 no longer fuses multiply-adds unasked
    }
    grid = (batch * heads_kv * row_blocks * splits,)
    return Launch(grid, arguments, constants, combine, blocks, splits, out, lse, parts, part_lse, counters)


def flash_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_table: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    *,
    mask: str = "none",
    scale: float | None = None,
    with_lse: bool = False,
    precision: str = "ieee",
    splits: int | None = None,
    blocks: BlockShape | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale Q K^T) V for few queries q (B, Hq, Sq, D) and a cache k (B, Hkv, Skv, D), v (B, Hkv, Skv, Dv): (B, Hq, Sq, Dv).

    With a `page_table` (B, pages of a sequence), int32, k and v are pages (pages, Hkv, page size, D or Dv) of any size and in any order
    (paged.py). `lengths` (B,), int32, says how many keys each sequence has, at most those that there is room for; what lies behind
    them is not read. Everything else, masks, scale, strides, precision and the log-sum-exp, is as in `flash_v2_forward`, masks being
    aligned to the end of each sequence. `splits` says into how many parts the keys are cut, by default as many as fill the device. Two
    calls give the same bits. Not differentiable. Raises UsageError for inputs that do not fit together or that the kernel does not take.
    """
    launch = prepare(
        q, k, v, page_table, lengths,
        mask=mask, scale=scale, with_lse=with_lse, precision=precision, splits=splits, blocks=blocks,
    )  # fmt: skip
    run(launch)
    return launch.out if launch.lse is None else (launch.out, launch.lse)


def run(launch: Launch) -> Any:
    """Make the launches, on their tensors' device; gives Triton's compiled kernel over the splits, or None from the interpreter."""
    with on(launch.out.device):
        return _launch(launch)


def _launch(launch: Launch) -> Any:
    compiled = flash_decode_kernel[launch.grid](*launch.arguments, **launch.constants)
    if launch.combine is not None:
        combine_kernel[launch.combine.grid](*launch.combine.arguments, **launch.combine.constants)
    return compiled


def launch_figures(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *cache: torch.Tensor, **options: Any
) -> dict[str, Any]:
    """Block shape, splits, registers, spills and shared memory of what `flash_decode(q, k, v, *cache, **options)` runs; runs it once."""
    launch = prepare(q, k, v, *cache, **options)
    return compiled_figures(launch.blocks, run(launch)) | {"splits": launch.splits}
