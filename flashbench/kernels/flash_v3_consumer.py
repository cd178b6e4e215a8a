"""The consumers of flash-v3, warpgroups of 64 queries each: scores, softmax, weights times V, tile after tile, as flash_v3.py tells it."""

from __future__ import annotations

import math

from flashbench.kernels.flash_v3_barriers import RELEASE, TURN, named_barrier, pin, release
from flashbench.kernels.flash_v3_e4m3 import LIFT, descale, score_scale, unpacked
from flashbench.kernels.flash_v3_queue import BATCH, DIAGONAL, END, FIRST_ROW, HEAD, LOW, STEADY, await_tile, told
from flashbench.kernels.flash_v3_schedule import ROWS
from flashbench.kernels.flash_v3_softmax import (
    as_operand,
    hidden,
    hidden_where_cut,
    maxima,
    rescaled,
    share_sums,
    weights_of,
)
from flashbench.kernels.gluon_names import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    store_tile,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LN_2: gl.constexpr = gl.constexpr(math.log(2))


@gluon.jit
def following(stage, parity, STAGES: gl.constexpr):
    """Place and parity of the next K or V tile. Known a step ahead: computed at the head of each, they would hold up its first product."""
    if stage == STAGES - 1:
        stage = 0
        parity = parity ^ 1
    else:
        stage = stage + 1
    return stage, parity


@gluon.jit
def v_operand(v_tiles, stage, BLOCK_KV: gl.constexpr, DV: gl.constexpr):
    """A tile of V as (keys, channels), however it lies: in 8 bits along its keys, else along its channels."""
    FP8: gl.constexpr = v_tiles.dtype == gl.float8e4nv
    tile = v_tiles.index(stage)
    return tile.reshape([DV, BLOCK_KV]).permute((1, 0)) if FP8 else tile.reshape([BLOCK_KV, DV])


@gluon.jit
def ask_for_scores(
    q_tiles, k_tiles, barriers, told_tiles, nothing, turn, stage, parity, shift, there,
    WHICH: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr, BLOCK_KV: gl.constexpr, STAGES: gl.constexpr, Q_PLACES: gl.constexpr,
    CAUSAL: gl.constexpr, PINGPONG: gl.constexpr, NAMED_RELEASE: gl.constexpr,
):  # fmt: skip
    """The first product of a tile, if one is `there` to wait for: (scores under way, their block, its stage and parity)."""
    q_full, _q_empty, k_full, k_empty, v_full, v_empty = barriers
    MINE: gl.constexpr = TURN + WHICH
    NEXT: gl.constexpr = TURN + (WHICH + 1) % CONSUMERS
    block = told(told_tiles, turn, END) - 1
    if CAUSAL:
        # Blocks that only other consumers' queries see: let go by, in turn.
        last_at = shift + told(told_tiles, turn, FIRST_ROW) + WHICH * ROWS + ROWS - 1
        nearest = max(min(block, max(last_at, 0) // BLOCK_KV), told(told_tiles, turn, LOW))
        for _ in range(block - nearest):
            if PINGPONG:
                named_barrier(MINE, "sync", 256, 4)
                named_barrier(NEXT, "arrive", 256, 4)
            mbarrier.wait(k_full.index(stage), parity)
            release(k_empty, stage, RELEASE, NAMED_RELEASE, CONSUMERS)
            mbarrier.wait(v_full.index(stage), parity)
            release(v_empty, stage, RELEASE + STAGES, NAMED_RELEASE, CONSUMERS)
            stage, parity = following(stage, parity, STAGES)
        block = nearest
    at = turn % Q_PLACES * CONSUMERS + WHICH
    mbarrier.wait(q_full.index(at), turn // Q_PLACES & 1, pred=there)
    mbarrier.wait(k_full.index(stage), parity, pred=there)
    if PINGPONG:
        named_barrier(MINE, "sync", 256, 4)
    q_tile = q_tiles.index(at).reshape([ROWS, D])
    k_tile = k_tiles.index(stage).reshape([BLOCK_KV, D]).permute((1, 0))
    return warpgroup_mma(q_tile, k_tile, nothing, use_acc=False, is_async=True), block, stage, parity


@gluon.jit
def consume(
    o, lse, tiles, o_tiles, barriers, told_tiles, told_full, seq_q, seq_kv, window, heads_q, heads_per_kv_head, scale_log2, descales,
    WHICH: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BLOCK_KV: gl.constexpr, STAGES: gl.constexpr,
    Q_PLACES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, TAIL: gl.constexpr, NEGATIVE_SCALE: gl.constexpr,
    WITH_LSE: gl.constexpr, OVERLAP: gl.constexpr, PINGPONG: gl.constexpr, CARRY: gl.constexpr, LAZY_RESCALE: gl.constexpr,
    EARLY_WAIT: gl.constexpr, NAMED_RELEASE: gl.constexpr, OUT_TILES: gl.constexpr,
):  # fmt: skip
    """A consumer's warpgroup: 64 queries of every tile, from the first product to the store of the output."""
    q_tiles, k_tiles, v_tiles = tiles
    _q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    ELEMENT: gl.constexpr = q_tiles.dtype
    FP8: gl.constexpr = q_tiles.dtype == gl.float8e4nv
    K: gl.constexpr = 32 if FP8 else 16
    # One m64nNk16 product of a warpgroup (k32 of 8 bits): warp w holds rows 16 w to 16 w + 15. P has the same rows, so that it goes from one
    # product into the next as a register operand, without a shuffle (FlashAttention-3, section 3.2).
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_KV, K])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, K])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, K // 8)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    # The assembler does not schedule across a branch: it comes before the exponentials, which conversions and the loop's end then run beside.
    BRANCH_FIRST: gl.constexpr = OVERLAP and EARLY_WAIT and LAZY_RESCALE
    MINE: gl.constexpr = TURN + WHICH
    NEXT: gl.constexpr = TURN + (WHICH + 1) % CONSUMERS
    if PINGPONG and WHICH == CONSUMERS - 1:
        named_barrier(NEXT, "arrive", 256, 4)  # the first turn is consumer 0's

    column = gl.arange(0, BLOCK_KV, layout=gl.SliceLayout(0, s_layout))
    nothing = gl.zeros([ROWS, BLOCK_KV], gl.float32, s_layout)
    my_row = WHICH * ROWS + gl.arange(0, ROWS, layout=s_rows)
    shift = seq_kv - seq_q
    stage = 0  # of the K tile that comes next
    parity = 0
    v_stage = 0  # of the V tile whose product is due
    v_parity = 0
    turn = 0
    await_tile(told_full, turn)
    end = told(told_tiles, turn, END)
    if FP8:
        bits = score_scale(descales, told_tiles, turn, heads_q, heads_per_kv_head, scale_log2, NEGATIVE_SCALE, end > 0)
    else:
        bits = scale_log2
    top = gl.full([ROWS], float("-inf"), gl.float32, s_rows)  # m, in bits
    total = share_sums(nothing)  # l, in shares
    acc = gl.zeros([ROWS, DV], gl.float32, o_layout)  # o, unnormalised
    alpha = gl.full([ROWS], 1.0, gl.float32, s_rows)
    p = as_operand(nothing, p_layout, ELEMENT)
    block = end - 1
    carried = False
    while end > 0:
        q_at = turn % Q_PLACES * CONSUMERS + WHICH
        at_key = shift + told(told_tiles, turn, FIRST_ROW) + my_row
        if not carried:
            # The first block of keys: its scores and their softmax. Its product with V is made one step later, and so on for every block.
            s, block, stage, parity = ask_for_scores(
                q_tiles, k_tiles, barriers, told_tiles, nothing, turn, stage, parity, shift, True,
                WHICH, CONSUMERS, D, BLOCK_KV, STAGES, Q_PLACES, CAUSAL, PINGPONG, NAMED_RELEASE,
            )  # fmt: skip
            if PINGPONG:
                named_barrier(NEXT, "arrive", 256, 4)
            s = warpgroup_mma_wait(0, deps=(s,))
            release(k_empty, stage, RELEASE, NAMED_RELEASE, CONSUMERS)
            if CAUSAL or TAIL:
                first_key = block * BLOCK_KV
                s = hidden(s, at_key - first_key, column, seq_kv - first_key, window, CAUSAL, WINDOW, NEGATIVE_SCALE)
            top = gl.full([ROWS], float("-inf"), gl.float32, s_rows)
            origin, alpha, top = maxima(s, top, bits, CAUSAL, NEGATIVE_SCALE, LAZY_RESCALE, FP8)
            weights, total = weights_of(s, origin, alpha, share_sums(nothing), bits, FP8)
            p = as_operand(weights, p_layout, ELEMENT)
            v_stage = stage
            v_parity = parity
            stage, parity = following(stage, parity, STAGES)

        low = told(told_tiles, turn, LOW)
        diagonal = told(told_tiles, turn, DIAGONAL)
        steady = told(told_tiles, turn, STEADY)
        for _ in range(block - low):
            block -= 1
            q_tile = q_tiles.index(q_at).reshape([ROWS, D])
            k_tile = k_tiles.index(stage).reshape([BLOCK_KV, D]).permute((1, 0))
            v_tile = v_operand(v_tiles, v_stage, BLOCK_KV, DV)
            if OVERLAP:
                # Scores of this block, then weights of the last one times V: the softmax of the former runs beside the latter.
                mbarrier.wait(k_full.index(stage), parity)
                if PINGPONG:
                    named_barrier(MINE, "sync", 256, 4)
                s = warpgroup_mma(q_tile, k_tile, nothing, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(v_stage), v_parity)
                acc = warpgroup_mma(unpacked(p, p_layout) if FP8 else p, v_tile, acc, is_async=True)
                if PINGPONG:
                    named_barrier(NEXT, "arrive", 256, 4)
                s = warpgroup_mma_wait(1, deps=(s,))
            else:
                # The same products, each after the other.
                mbarrier.wait(v_full.index(v_stage), v_parity)
                if PINGPONG:
                    named_barrier(MINE, "sync", 256, 4)
                acc = warpgroup_mma(unpacked(p, p_layout) if FP8 else p, v_tile, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                release(v_empty, v_stage, RELEASE + STAGES, NAMED_RELEASE, CONSUMERS)
                mbarrier.wait(k_full.index(stage), parity)
                s = warpgroup_mma(q_tile, k_tile, nothing, use_acc=False, is_async=True)
                if PINGPONG:
                    named_barrier(NEXT, "arrive", 256, 4)
                s = warpgroup_mma_wait(0, deps=(s,))
            release(k_empty, stage, RELEASE, NAMED_RELEASE, CONSUMERS)
            s = hidden_where_cut(
                s, block, diagonal, steady, at_key, column, seq_kv, window, BLOCK_KV, CAUSAL, WINDOW, NEGATIVE_SCALE
            )
            origin, alpha, top = maxima(s, top, bits, CAUSAL, NEGATIVE_SCALE, LAZY_RESCALE, FP8)
            if not BRANCH_FIRST:
                weights, total = weights_of(s, origin, alpha, total, bits, FP8)
            if OVERLAP:
                pin(top if EARLY_WAIT else total)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                release(v_empty, v_stage, RELEASE + STAGES, NAMED_RELEASE, CONSUMERS)
            if BRANCH_FIRST:
                acc = rescaled(acc, alpha, LAZY_RESCALE)
                weights, total = weights_of(s, origin, alpha, total, bits, FP8)
            v_stage = stage
            v_parity = parity
            stage, parity = following(stage, parity, STAGES)
            p = as_operand(weights, p_layout, ELEMENT)
            if not BRANCH_FIRST:
                acc = rescaled(acc, alpha, LAZY_RESCALE)

        # The last product with V. No product reads this Q any more: where the output has a place of its own, another Q may come now.
        if OUT_TILES:
            mbarrier.arrive(q_empty.index(q_at))
        v_tile = v_operand(v_tiles, v_stage, BLOCK_KV, DV)
        whole, summit = total, top
        ended = turn
        turn += 1
        await_tile(told_full, turn)
        end = told(told_tiles, turn, END)
        if FP8:
            of_v = descale(descales, told_tiles, ended, heads_q, heads_per_kv_head, 2, True)
            bits = score_scale(
                descales, told_tiles, turn, heads_q, heads_per_kv_head, scale_log2, NEGATIVE_SCALE, end > 0
            )
        if CARRY:
            # Beside it, the first scores of the next tile: no tile begins or ends with nothing under way. Behind the last tile they are
            # computed of what lies there, and nobody looks at them. (A branch around both products is one that ptxas 12.8 gets wrong: it
            # left the address of V in one of the two.)
            carried = end > 0
            s, block, stage, parity = ask_for_scores(
                q_tiles, k_tiles, barriers, told_tiles, nothing, turn, stage, parity, shift, carried,
                WHICH, CONSUMERS, D, BLOCK_KV, STAGES, Q_PLACES, CAUSAL, PINGPONG, NAMED_RELEASE,
            )  # fmt: skip
        mbarrier.wait(v_full.index(v_stage), v_parity)
        acc = warpgroup_mma(unpacked(p, p_layout) if FP8 else p, v_tile, acc, is_async=True)
        if CARRY:
            if PINGPONG:
                named_barrier(NEXT, "arrive", 256, 4)
            s = warpgroup_mma_wait(1, deps=(s,))
            if carried:
                release(k_empty, stage, RELEASE, NAMED_RELEASE, CONSUMERS)
                if CAUSAL or TAIL:
                    first_key = block * BLOCK_KV
                    s = hidden(
                        s, shift + told(told_tiles, turn, FIRST_ROW) + my_row - first_key, column, seq_kv - first_key, window,
                        CAUSAL, WINDOW, NEGATIVE_SCALE,
                    )  # fmt: skip
                top = gl.full([ROWS], float("-inf"), gl.float32, s_rows)
                origin, alpha, top = maxima(s, top, bits, CAUSAL, NEGATIVE_SCALE, LAZY_RESCALE, FP8)
                s, total = weights_of(s, origin, alpha, share_sums(nothing), bits, FP8)
                pin(top if EARLY_WAIT else total)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        if CARRY:
            p = as_operand(s, p_layout, ELEMENT)
        release(v_empty, v_stage, RELEASE + STAGES, NAMED_RELEASE, CONSUMERS)
        if CARRY:
            v_stage = stage
            v_parity = parity
            stage, parity = following(stage, parity, STAGES)

        # A query that saw no key has total 0 and top -inf: its output is 0, its log-sum-exp -inf.
        divisor = gl.convert_layout(gl.sum(whole, 1), s_rows)
        divisor = gl.where(divisor > 0.0, divisor, 1.0)
        batch = told(told_tiles, ended, BATCH)
        head_q = told(told_tiles, ended, HEAD)
        first_row = told(told_tiles, ended, FIRST_ROW)
        if WITH_LSE:
            row = first_row + my_row
            lse_row = (batch * heads_q + head_q).to(gl.int64) * seq_q + row
            if FP8:
                summit = summit - LIFT
            gl.store(lse + lse_row, (summit + gl.log2(divisor)) * LN_2, mask=row < seq_q)
        unit = of_v if FP8 else 1.0
        acc = acc * gl.convert_layout(unit / divisor, o_rows)[:, None]
        out_tile = o_tiles.index(WHICH)
        if OUT_TILES:
            store_wait(0)  # the store of the tile before has read its place
            partition_barrier()
        out_tile.reshape([ROWS, DV]).store(acc.to(o.dtype))
        fence_async_shared()
        store_tile(o, [batch, head_q, first_row + WHICH * ROWS, 0], out_tile)
        if not OUT_TILES:
            store_wait(0)
            mbarrier.arrive(q_empty.index(q_at))
        acc = gl.zeros([ROWS, DV], gl.float32, o_layout)
        alpha = gl.full([ROWS], 1.0, gl.float32, s_rows)
    store_wait(0)  # a block's shared memory must outlive the stores that read it
