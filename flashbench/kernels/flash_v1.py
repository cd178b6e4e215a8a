"""FlashAttention (v1), forward, in portable Triton: the loops of 2022, keys outside and queries inside. For history and comparison.

Idea (Dao et al., arXiv 2205.14135, algorithm 1). One program owns a head. It takes a block of keys and values on chip and walks over all
the queries that see it; then it takes the next. A query block therefore comes by once for each key block, and what is known of its row by
then, the output o so far, the maximum m and the sum l, waits in HBM in between. With scores s of one tile, t = max_j s_j its own maximum
and u = sum_j exp(s_j - t) its own sum (lines 10 to 13):

    m' = max(m, t)     l' = exp(m - m') l + exp(t - m') u     o' = (exp(m - m') l o + exp(t - m') sum_j exp(s_j - t) v_j) / l'

No score reaches HBM, which was the point: Θ(N² d² / M) accesses for M elements of on-chip memory in place of Θ(N d + N²). As in the first
public kernel, o waits in fp32 and is normalised in every step, the grid is batch x heads, and only the last key block that a query sees
writes its output in the dtype of the tensors. What FlashAttention-2 (Dao, arXiv 2307.08691, section 3) changed, and why:

- The loops were swapped, queries outside. Nobody else needs a query's row, so o, m and l stay in registers and go to HBM once; and query
  blocks are independent, so that the sequence is one more axis to run in parallel. Here a launch of fewer heads than multiprocessors
  leaves the others without work, whatever the length.
- o stays unnormalised until the end: the two products of o with a number a row, and the division, go from every step to the last.
- m and l became one number a row, the log-sum-exp.

One part of the difference cannot be written in Triton: inside a tile v1 gave each warp a slice of the keys and added the warps' parts of o
up through shared memory ("split-K"), and v2 gives each warp a slice of the queries. Triton divides a product among warps itself, by rows
first. So the distance between this kernel and flash-v2 is that of the loop orders, without that of the warps.

Cost of one call, for B sequences, H query heads, N queries, M keys, head dimension d, elements of s bytes, J = M / BLOCK_KV key blocks:

    FLOPs      4 B H N M d for the two products (half of it causal), and B H N M exponentials
    HBM bytes  B H N (J s d + (J - 1) (8 d + 16) + s d) for Q, o, m and l, and s B H_kv 2 M d for K and V: in bf16 at N = M = 16k, d = 64
               and key blocks of 128, 160 times what must move. `tiled-v1` of model/traffic.py counts it, with what the L2 keeps
    shared     s (BLOCK_Q + 2 BLOCK_KV) d per program, and room to turn o between the layouts of the product and of memory
    registers  s in fp32, BLOCK_Q BLOCK_KV over the threads of a program, and o twice
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashbench.kernels.blocks import BlockShape, compiled_figures, default_blocks, padded
from flashbench.kernels.flash_v2 import LN_2, LOG2_E
from flashbench.kernels.inputs import check_inputs, device_limits, on, product_dtype, visibility
from flashbench.kernels.schedule import visible
from flashbench.kernels.tiles import load_rows

KERNEL = "flash-v1"
COUNTS = ("heads_q", "heads_per_kv_head", "seq_q", "seq_kv", "window")


@triton.jit(do_not_specialize=COUNTS)
def flash_v1_kernel(
    q, k, v,
    o, lse,  # pointers to contiguous (batch, heads_q, seq_q, HEAD_DIM_V) and (batch, heads_q, seq_q); lse is None unless WITH_LSE
    waiting_o, waiting_m, waiting_l,  # the same shapes in fp32: what waits for the next key block; m in bits
    q_strides, k_strides, v_strides,  # in elements, in the order batch, head, position, channel
    heads_q, heads_per_kv_head, seq_q, seq_kv, window,
    scale_log2,  # scale * log2(e): scores are in bits from here on
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr,  # the same, padded to a power of two
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TAIL: tl.constexpr,
    WITH_LSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    batch = head // heads_q
    head_q = head % heads_q
    head_kv = head_q // heads_per_kv_head
    shift = seq_kv - seq_q  # query i stands at key i + shift, so the last query at the last key
    head_row = head.to(tl.int64) * seq_q  # 64-bit before it is multiplied by a row's length
    inside = tl.arange(0, BLOCK_Q)
    columns = tl.arange(0, DV)
    tile = inside[:, None] * HEAD_DIM_V + columns[None, :]

    if CAUSAL:
        # Bottom-right aligned, the first -shift queries see no key. What is whole blocks of them is never taken up below.
        for row in tl.range(0, tl.maximum(-shift, 0) // BLOCK_Q * BLOCK_Q, BLOCK_Q):
            empty = tl.zeros([BLOCK_Q, DV], o.dtype.element_ty)
            tl.store(o + (head_row + row) * HEAD_DIM_V + tile, empty, mask=(columns < HEAD_DIM_V)[None, :])
            if WITH_LSE:
                tl.store(lse + head_row + row + inside, tl.full([BLOCK_Q], float("-inf"), tl.float32))

    low = 0
    if WINDOW:
        low = tl.maximum(shift - window + 1, 0) // BLOCK_KV * BLOCK_KV  # no query sees a key before
    for key in tl.range(low, seq_kv, BLOCK_KV, num_stages=1):
        k_tile = load_rows(k, k_strides, batch, head_kv, key, seq_kv, HEAD_DIM, BLOCK_KV, D, True, False)
        v_tile = load_rows(v, v_strides, batch, head_kv, key, seq_kv, HEAD_DIM_V, BLOCK_KV, DV, True, False)
        # The queries that see a key of the block: from the one that stands at its first key, to the one whose window begins at its last.
        first = 0
        end = seq_q
        if CAUSAL:
            first = tl.maximum(key - shift, 0) // BLOCK_Q * BLOCK_Q
        if WINDOW:
            end = tl.minimum(seq_q, tl.minimum(key + BLOCK_KV, seq_kv) - 1 - shift + window)

        # What one step of the outer loop stores, the next one loads. Two things keep the order. `num_stages=1`: a pipelined loop fetches
        # tiles ahead of the iteration that needs them, and o, m and l must not be fetched ahead of their store. And the barrier below:
        # the compiler loads and stores a tile in layouts of its choice, so that a thread reads what another one of the program wrote. A
        # barrier of the program is enough, since no other touches these rows; inside a step every row is met once.
        for row in tl.range(first, end, BLOCK_Q, num_stages=1):
            exists = row + inside < seq_q
            keep = exists[:, None]
            if DV != HEAD_DIM_V:
                keep = keep & (columns < HEAD_DIM_V)[None, :]
            at = head_row + row
            # The first key block that one of these queries sees finds nothing to load; the last one leaves nothing for another.
            begun = key > low
            last = key + BLOCK_KV >= seq_kv
            if WINDOW:
                begun = key > tl.maximum(shift + row - window + 1, 0) // BLOCK_KV * BLOCK_KV
            if CAUSAL:
                last = key + BLOCK_KV > shift + tl.minimum(row + BLOCK_Q, seq_q) - 1
            # All of a tile is asked for at once: its way from HBM is waited for once.
            q_tile = load_rows(q, q_strides, batch, head_q, row, seq_q, HEAD_DIM, BLOCK_Q, D, True, False)
            waits = tl.where(
                begun, exists, False
            )  # not `&`: of a scalar and a tile the interpreter of Triton 3.9 makes no mask
            before_m = tl.load(waiting_m + at + inside, mask=waits, other=float("-inf"))
            before_l = tl.load(waiting_l + at + inside, mask=waits, other=0.0)
            before_o = tl.load(waiting_o + at * HEAD_DIM_V + tile, mask=tl.where(begun, keep, False), other=0.0)

            s = tl.dot(q_tile, k_tile.T, input_precision=PRECISION) * scale_log2
            if CAUSAL or TAIL:
                seen = visible(shift + row + inside, key + tl.arange(0, BLOCK_KV), seq_kv, window, CAUSAL, WINDOW)
                s = tl.where(seen, s, float("-inf"))
            top = tl.max(s, 1)
            p = tl.exp2(s - tl.where(top == float("-inf"), 0.0, top)[:, None])  # no key seen: -inf - -inf would be NaN
            pv = tl.dot(p.to(v_tile.dtype), v_tile, input_precision=PRECISION)
            new_m = tl.maximum(before_m, top)
            origin = tl.where(new_m == float("-inf"), 0.0, new_m)
            old_weight = tl.exp2(before_m - origin) * before_l
            new_weight = tl.exp2(top - origin)
            new_l = old_weight + new_weight * tl.sum(p, 1)
            divisor = tl.where(new_l > 0.0, new_l, 1.0)  # a query that has seen no key yet keeps o = 0, m = -inf, l = 0
            new_o = before_o * (old_weight / divisor)[:, None] + pv * (new_weight / divisor)[:, None]
            if last:
                tl.store(o + at * HEAD_DIM_V + tile, new_o.to(o.dtype.element_ty), mask=keep)
                if WITH_LSE:
                    tl.store(lse + at + inside, (new_m + tl.log2(divisor)) * LN_2, mask=exists)
            else:
                tl.store(waiting_o + at * HEAD_DIM_V + tile, new_o, mask=keep)
                tl.store(waiting_m + at + inside, new_m, mask=exists)
                tl.store(waiting_l + at + inside, new_l, mask=exists)
        tl.debug_barrier()


class Launch(NamedTuple):
    """One launch, ready to make: `flash_v1_kernel[grid](*arguments, **constants)` fills out and lse."""

    grid: tuple[int]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    blocks: BlockShape
    out: torch.Tensor
    lse: torch.Tensor | None


def shared_bytes(
    blocks: BlockShape, _capability: tuple[int, int] | None, dtype: str, head_dim: int, head_dim_v: int
) -> int:
    """Shared memory of one program, from above: a tile of Q, K and V, and one of o in fp32 on its way between the layout of the product
    and that of memory.
    """
    d, dv = padded(head_dim), padded(head_dim_v)
    tiles = blocks.block_q * d + blocks.block_kv * (d + dv)
    return tiles * (4 if dtype in ("fp32", "tf32") else 2) + 4 * blocks.block_q * dv + 2048


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
    """The launch for `flash_v1_forward` with the same arguments; allocates its outputs and what waits between steps, launches nothing."""
    check_inputs(q, k, v, precision)
    batch, heads_q, seq_q, head_dim = q.shape
    heads_kv, seq_kv, head_dim_v = v.shape[1:]
    causal, window = visibility(mask, seq_kv)
    scale = head_dim**-0.5 if scale is None else scale
    if blocks is None:
        limits = device_limits(q.device)
        dtype = product_dtype(q, precision)
        blocks = default_blocks(
            limits.capability, dtype, head_dim, head_dim_v, limits.shared_bytes, descriptors=False, kernel=KERNEL, need=shared_bytes
        )  # fmt: skip

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    out = empty(batch, heads_q, seq_q, head_dim_v, dtype=v.dtype)
    lse = empty(batch, heads_q, seq_q) if with_lse else None
    if seq_kv > blocks.block_kv:
        waiting_o = out if v.dtype == torch.float32 else empty(*out.shape)
        waiting_m, waiting_l = empty(batch, heads_q, seq_q), empty(batch, heads_q, seq_q)
    else:
        waiting_o = waiting_m = waiting_l = empty(
            1
        )  # with one key block nothing waits, and this pointer is never followed
    arguments = (
        q, k, v, out, lse, waiting_o, waiting_m, waiting_l, q.stride(), k.stride(), v.stride(), heads_q, heads_q // heads_kv, seq_q,
        seq_kv, window or 0, scale * LOG2_E,
    )  # fmt: skip
    constants = {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "D": padded(head_dim),
        "DV": padded(head_dim_v),
        "BLOCK_Q": blocks.block_q,
        "BLOCK_KV": blocks.block_kv,
        "CAUSAL": causal,
        "WINDOW": window is not None,
        "TAIL": not causal and seq_kv % blocks.block_kv != 0,
        "WITH_LSE": with_lse,
        "PRECISION": precision,
        "num_warps": blocks.num_warps,
        "num_stages": 1,
        "enable_fp_fusion": True,
    }
    return Launch((batch * heads_q,), arguments, constants, blocks, out, lse)


def flash_v1_forward(
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
    """softmax(scale Q K^T) V in the first FlashAttention's loop order, with the arguments, masks and results of `flash_v2_forward`.

    Takes 4 B H N (d_v + 2) bytes more while it runs, unless all keys fit one block or o is fp32. Raises UsageError for inputs that do
    not fit together or that the kernel does not take.
    """
    launch = prepare(q, k, v, mask=mask, scale=scale, with_lse=with_lse, precision=precision, blocks=blocks)
    run(launch)
    return launch.out if launch.lse is None else (launch.out, launch.lse)


def run(launch: Launch) -> Any:
    """Make the launch, on its tensors' device; gives Triton's compiled kernel, or None from the interpreter."""
    with on(launch.out.device):
        return flash_v1_kernel[launch.grid](*launch.arguments, **launch.constants)


def launch_figures(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> dict[str, Any]:
    """Block shape, registers, spills and shared memory of the kernel that `flash_v1_forward(q, k, v, **options)` runs; runs it once."""
    launch = prepare(q, k, v, **options)
    return compiled_figures(launch.blocks, run(launch))
