"""The consumers of flash-v3's backward pass, warpgroups of 64 keys each: five products for each block of queries, as flash_v3_backward.py tells it."""

from __future__ import annotations

from flashbench.kernels.flash_v3_barriers import named_barrier
from flashbench.kernels.flash_v3_schedule import HALF, KEYS, dealt, query_blocks, visible_queries
from flashbench.kernels.gluon_names import (
    add_tile,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    product_under_way,
    store_tile,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)

EXCHANGE: gl.constexpr = gl.constexpr(8)  # the named barrier where consumers meet


@gluon.jit
def consume(
    dq_sums, dk, dv, tiles, d_s_tiles, dq_tiles, barriers, sizes, scale, scale_log2,
    WHICH: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, TAIL: gl.constexpr, WITH_DQ: gl.constexpr,
):  # fmt: skip
    """A consumer's warpgroup: 64 keys, with their dK and dV, and its half of every block's dQ."""
    q_tiles, k_tiles, v_tiles, d_out_tiles, lse_tiles, delta_tiles = tiles
    k_full, v_full, q_full, q_empty, d_out_full, d_out_empty = barriers
    batch_heads, heads_kv, group, seq_q, seq_kv, window, sections = sizes
    BLOCK_KV: gl.constexpr = CONSUMERS * KEYS
    ELEMENT: gl.constexpr = q_tiles.dtype
    # The consumers share a block's dQ: each makes half of its channels for all queries, or a half of its queries.
    BLOCK_Q: gl.constexpr = HALVES * HALF
    DQ_CHANNELS: gl.constexpr = D // CONSUMERS if HALVES == 1 else D
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_CHANNELS, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    of_key: gl.constexpr = gl.SliceLayout(1, s_layout)
    of_query: gl.constexpr = gl.SliceLayout(0, s_layout)

    head, key_block = dealt(gl.program_id(0), batch_heads, gl.cdiv(seq_kv, BLOCK_KV), sections, 1, CAUSAL)
    batch = head // heads_kv
    head_kv = head % heads_kv
    first_key = key_block * BLOCK_KV
    low, steady, edge, end = query_blocks(first_key, seq_q, seq_kv, window, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW)
    key = first_key + WHICH * KEYS + gl.arange(0, KEYS, layout=of_key)
    at_query = key - (seq_kv - seq_q)
    column = gl.arange(0, HALF, layout=of_query)
    k_tile = k_tiles.index(WHICH).reshape([KEYS, D])
    v_tile = v_tiles.index(WHICH).reshape([KEYS, D])
    nothing = gl.zeros([KEYS, HALF], gl.float32, s_layout)
    no_dq = gl.zeros([HALF, DQ_CHANNELS], gl.float32, dq_layout)
    dk_sum = gl.zeros([KEYS, D], gl.float32, d_layout)
    dv_sum = gl.zeros([KEYS, D], gl.float32, d_layout)

    step = 0
    mbarrier.wait(k_full.index(0), 0)
    mbarrier.wait(q_full.index(0), 0)
    s = warpgroup_mma(
        k_tile, q_tiles.index(0).reshape([HALF, D]).permute((1, 0)), nothing, use_acc=False, is_async=True
    )
    mbarrier.wait(v_full.index(0), 0)
    mbarrier.wait(d_out_full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=(s,))
    for member in range(group):
        head_q = head_kv * group + member
        # Part 0 is the diagonal, 1 the steady loop, 2 a window's far edge, or all blocks where some keys do not exist.
        for part in gl.static_range(0 if CAUSAL else 1, 3 if WINDOW or TAIL else 2):
            first_block = low if part == 0 else steady if part == 1 else edge
            behind = steady if part == 0 else edge if part == 1 else end
            for block in range(first_block, behind):
                stage = step % STAGES
                buffer = step % 2 * (HALVES * CONSUMERS)
                # One half of the block after the other. `next_s`: scores of the next half, under way.
                next_s = s
                for h in gl.static_range(HALVES):
                    part_of_stage = stage * HALVES + h
                    q_tile = q_tiles.index(part_of_stage).reshape([HALF, D])
                    d_out_tile = d_out_tiles.index(part_of_stage).reshape([HALF, D])
                    d_p = warpgroup_mma(v_tile, d_out_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
                    if h > 0:
                        s = warpgroup_mma_wait(3, deps=(next_s,))
                    if h + 1 < HALVES:
                        next_q = q_tiles.index(part_of_stage + 1).reshape([HALF, D])
                        next_s = warpgroup_mma(k_tile, next_q.permute((1, 0)), nothing, use_acc=False, is_async=True)
                    top = lse_tiles.index(part_of_stage).reshape([HALF]).load(of_query)
                    bits = s * scale_log2 - top[None, :]
                    if part != 1:
                        seen = visible_queries(
                            at_query - (block * BLOCK_Q + h * HALF), column, key, seq_kv, window, CAUSAL, WINDOW
                        )
                        bits = gl.where(seen, bits, float("-inf"))
                    p = gl.exp2(bits)
                    weights = gl.convert_layout(p.to(ELEMENT), p_layout)
                    dv_sum = warpgroup_mma(weights, d_out_tile, dv_sum, is_async=True)
                    d_p = warpgroup_mma_wait(2 if h + 1 < HALVES else 1, deps=(d_p,))
                    offset = delta_tiles.index(part_of_stage).reshape([HALF]).load(of_query)
                    d_s = (p * (d_p - offset[None, :])).to(ELEMENT)
                    if WITH_DQ:
                        d_s_tiles.index(buffer + h * CONSUMERS + WHICH).store(d_s)
                    dk_sum = warpgroup_mma(gl.convert_layout(d_s, p_layout), q_tile, dk_sum, is_async=True)
                if WITH_DQ:
                    # Beside dV and dK: the consumers meet.
                    fence_async_shared()
                    named_barrier(EXCHANGE, "sync", CONSUMERS * 128, 4)
                    dq = product_under_way(no_dq)
                    for c in gl.static_range(CONSUMERS):
                        k_part = k_tiles.index(c).reshape([KEYS, D])
                        if HALVES == 1:
                            d_s_tile = d_s_tiles.index(buffer + c)
                            k_part = k_part.slice(WHICH * DQ_CHANNELS, DQ_CHANNELS, dim=1)
                        else:
                            d_s_tile = d_s_tiles.index(buffer + WHICH * CONSUMERS + c)
                        dq = warpgroup_mma(d_s_tile.permute((1, 0)), k_part, dq, use_acc=c > 0, is_async=True)
                    dv_sum, dk_sum = warpgroup_mma_wait(CONSUMERS, deps=(dv_sum, dk_sum))
                    mbarrier.arrive(q_empty.index(stage))
                    mbarrier.arrive(d_out_empty.index(stage))
                # Scores of the next block; behind the last, of whatever the ring holds, which does no harm. When they are there, the next
                # step's first product is asked for at once: all that it waits for is waited for before.
                step += 1
                next_stage = step % STAGES
                mbarrier.wait(q_full.index(next_stage), step // STAGES & 1)
                next_q = q_tiles.index(next_stage * HALVES).reshape([HALF, D])
                s = warpgroup_mma(k_tile, next_q.permute((1, 0)), nothing, use_acc=False, is_async=True)
                if WITH_DQ:
                    dq = warpgroup_mma_wait(1, deps=(dq,))
                    dq_tile = dq_tiles.index(WHICH)
                    store_wait(0)
                    partition_barrier()
                    dq_tile.reshape([HALF, DQ_CHANNELS]).store(dq)
                    fence_async_shared()
                    if HALVES == 1:
                        add_tile(dq_sums, [batch, head_q, block * BLOCK_Q, WHICH * DQ_CHANNELS], dq_tile)
                    else:
                        add_tile(dq_sums, [batch, head_q, block * BLOCK_Q + WHICH * HALF, 0], dq_tile)
                else:
                    dv_sum, dk_sum = warpgroup_mma_wait(1, deps=(dv_sum, dk_sum))
                    mbarrier.arrive(q_empty.index(stage))
                    mbarrier.arrive(d_out_empty.index(stage))
                mbarrier.wait(d_out_full.index(next_stage), step // STAGES & 1)
                s = warpgroup_mma_wait(0, deps=(s,))

    if WITH_DQ:
        named_barrier(EXCHANGE, "sync", CONSUMERS * 128, 4)  # nobody reads this consumer's keys any more
    out_row = first_key + WHICH * KEYS
    v_tile.store(dv_sum.to(ELEMENT))
    k_tile.store((dk_sum * scale).to(ELEMENT))
    fence_async_shared()
    partition_barrier()  # every thread's values are there, and visible to the copy engine
    store_tile(dv, [batch, head_kv, out_row, 0], v_tiles.index(WHICH))
    store_tile(dk, [batch, head_kv, out_row, 0], k_tiles.index(WHICH))
    store_wait(0)
