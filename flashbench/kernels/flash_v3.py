"""FlashAttention-3, forward, for Hopper (sm_90), in Gluon: the same online softmax as flash_v2.py, on a machine that works asynchronously.

What was left to gain. flash_v2.py does one thing after the other: every warp loads, multiplies, exponentiates. On Hopper the copy engine (TMA)
and the matrix unit (wgmma) work by themselves once one thread has asked, and a multiprocessor has 4,096 FLOP a clock of products but only 16
exponentials: at head dimension 128 the exponentials of a block take half as long as its two products, at 64 as long, and in v2 much of that
time the matrix unit waits. FlashAttention-3 (Shah et al., arXiv 2407.08608) hides them. This kernel is that story, each step a switch of
flash_v3_launches.Design:

- Roles (section 3.1 of the paper). One warp, the producer, does nothing but ask for tiles; two or three warpgroups, the consumers, compute
  64 queries each. They meet at mbarriers in shared memory: full (the bytes have come) and empty (all have read them). The producer runs as
  far ahead as there are places, needs hardly any registers, and gives them to the consumers (setmaxnreg: 240 and 24 where all had 168).
- OVERLAP (section 3.2). A consumer asks for the scores of block j, then for the product of block j - 1's weights with V, waits for the
  former only, and does its softmax beside the latter. The weights never leave the registers: one product's layout is the next one's operand.
- PINGPONG (section 3.1). Consumers take turns at the matrix unit, so that one multiplies while the other exponentiates.
- Persistence. One program per multiprocessor walks over many tiles; the next tile's Q, K and V come while the last one is still written.
- LONGEST_FIRST. Causal tiles differ in length, so they start with the longest, dealt out back and forth (flash_v3_schedule.py).
- LATE_RESCALE and NAMED_RELEASE are smaller: see Design. Two more small ones are always there: each thread keeps the sum of its own weights
  (share_sums), and where the next tile is gets computed beside the last product of this one (pin_indices).

The barriers cannot lock. Number the blocks of keys over all tiles of a program, 0, 1, 2, ...; all roles count alike. The producer fills Q,
then K_j and V_j in turn, and before it fills block j it waits until every consumer has given back block j - STAGES. A consumer that waits
for K_j has given back every K before it and every V but the last, so nothing that the producer still needs to fill it (STAGES >= 1); one that
waits for V_(j-1) has given back V_(j-2), and one that waits for the Q of a tile has given back everything. So no wait can be part of a circle.
In ping-pong, all consumers take equally many turns; the one whose turn it is has done the fewest, and what it waits for needs no more of the
others than blocks before j - 1, which they gave back before they asked for their own turn. (tests/kernels/v3_emulator.py runs it so.)

What the assembler must not undo. It reorders around waits as it likes, and would move the wait for the second product up, in front of the
softmax, which silently ends the overlap; `pin` keeps it, and tests/kernels/test_flash_v3_compiled.py reads the machine code to see that it
did. Masked blocks run in loops of their own, at the diagonal and at a window's left edge; from the last block of keys to the first.

Cost of one call, in the letters of flash_v2.py: the FLOPs, exponentials and least HBM bytes are the same. K and V come from the L2 once for
each tile of 64 queries times the consumers. One program takes, in bf16 at head dimension 128, 192 KiB of shared memory (Q 32, two stages of K
and V 64 each, O 32), and a consumer's thread 64 registers for o, 64 for s and 64 for the weights in use and the next ones.

Sources: the paper; Dao-AILab/flash-attention, hopper/ (tile sizes, registers, RescaleOBeforeGemm) and its pull request 2294 (ping-pong off at
head dimension 128); pull requests 205 to 219, 829, 3506 and 3582 of facebookexperimental/triton, which climb the same ladder in TLX; the PTX ISA
on wgmma, mbarrier and bar. What each step was to bring, and brought, stands in docs/flash-v3.md.
"""

from __future__ import annotations

import math

from flashbench.kernels.flash_v3_barriers import RELEASE, TURN, await_release, named_barrier, pin, pin_indices, release
from flashbench.kernels.flash_v3_queue import ONE_NUMBER, drawn, tell, told
from flashbench.kernels.flash_v3_schedule import position, tile_at, visible
from flashbench.kernels.gluon_names import (
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    partition_barrier,
    store_tile,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LN_2: gl.constexpr = gl.constexpr(math.log(2))
ROWS: gl.constexpr = gl.constexpr(64)  # queries of a consumer: as many as one warpgroup's matrix product has
COUNTS = ("batch_heads", "heads_q", "heads_per_kv_head", "seq_q", "seq_kv", "window", "heads_per_section", "tile_count")


@gluon.jit
def produce(
    sources, tiles, barriers, line, queue, sizes, heads_q, heads_per_kv_head,
    CONSUMERS: gl.constexpr, BLOCK_KV: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, LONGEST_FIRST: gl.constexpr, QUEUE: gl.constexpr, NAMED_RELEASE: gl.constexpr,
):  # fmt: skip
    """The producer's warp: loads what the consumers are going to need, as far ahead as there is room."""
    q, k, v = sources
    q_tiles, k_tiles, v_tiles = tiles
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    places, place_full = line
    batch_heads, seq_q, seq_kv, window, heads_per_section, tile_count = sizes
    program, programs = gl.program_id(0), gl.num_programs(0)
    BLOCK_Q: gl.constexpr = CONSUMERS * ROWS
    step = 0  # K and V tiles loaded so far, over all tiles of queries: the ring goes on from one to the next
    turn = 0
    place = program
    while place < tile_count:
        head, first_row, end, _, _, low = tile_at(
            place, batch_heads, seq_q, seq_kv, window, heads_per_section, tile_count,
            BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW, LONGEST_FIRST,
        )  # fmt: skip
        batch = head // heads_q
        head_q = head % heads_q
        head_kv = head_q // heads_per_kv_head
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(c), (turn & 1) ^ 1)
            mbarrier.expect(q_full.index(c), q.block_type.nbytes)
            load_tile(q, [batch, head_q, first_row + c * ROWS, 0], q_full.index(c), q_tiles.index(c))
        following = position(turn + 1, program, programs, LONGEST_FIRST)
        blocks = end - low
        for i in range(blocks):
            if QUEUE:
                # Before the last block, for which there is no room yet: late, so that nobody holds a tile that another could begin, and while
                # the answer travels, the consumers are busy.
                if i == blocks - 1:
                    following = drawn(queue, programs, tile_count)
                    tell(places, place_full, turn, following)
            key = (end - 1 - i) * BLOCK_KV
            stage = step % STAGES
            lap = step // STAGES
            await_release(k_empty, stage, RELEASE, lap, NAMED_RELEASE, CONSUMERS)
            mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
            load_tile(k, [batch, head_kv, key, 0], k_full.index(stage), k_tiles.index(stage))
            await_release(v_empty, stage, RELEASE + STAGES, lap, NAMED_RELEASE, CONSUMERS)
            mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
            load_tile(v, [batch, head_kv, key, 0], v_full.index(stage), v_tiles.index(stage))
            step += 1
        place = following
        turn += 1


@gluon.constexpr_function
def rows_of(layout):
    """The layout of one number for each row of a matrix."""
    return gl.SliceLayout(1, layout)


@gluon.jit
def share_sums(p):
    """Sums over the keys, one for each of the four threads that share a row, (queries, 4): as far as a thread gets by itself.

    A thread holds keys 8 i + 2 (thread % 4) and the next one (see `visible`). What a row adds up to is asked for once, at the end.
    """
    shares = p.reshape([p.shape[0], p.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(shares, 3), 1)


@gluon.jit
def hidden(
    s, at_key, column, seq_kv, window, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, NEGATIVE_SCALE: gl.constexpr
):  # fmt: skip
    """Scores of a block of keys with those that a mask hides, or that lie behind the last key, out of the way: times the scale, -inf."""
    return gl.where(
        visible(at_key, column, seq_kv, window, CAUSAL, WINDOW), s, float("inf") if NEGATIVE_SCALE else float("-inf")
    )


@gluon.jit
def softmax_step(s, top, total, scale_log2, MASKED: gl.constexpr, NEGATIVE_SCALE: gl.constexpr):
    """Weights of a block of scores, and what the running maximum and sums become: (p, alpha, m, l). As in flash_v2.py, but that l is kept as
    what each of a row's four threads has added up (share_sums)."""
    extreme = gl.min(s, 1) if NEGATIVE_SCALE else gl.max(s, 1)
    new_top = gl.maximum(top, extreme * scale_log2)
    origin = new_top
    if MASKED:
        origin = gl.where(new_top == float("-inf"), 0.0, new_top)  # no key seen yet: -inf - -inf would be NaN
    p = gl.exp2(s * scale_log2 - origin[:, None])
    alpha = gl.exp2(top - origin)
    of_shares = gl.convert_layout(alpha, rows_of(total.type.layout))
    return p, alpha, new_top, total * of_shares[:, None] + share_sums(p)


@gluon.jit
def consume(
    o, lse, tiles, o_tiles, barriers, line, sizes, heads_q, scale_log2,
    WHICH: gl.constexpr, CONSUMERS: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BLOCK_KV: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, TAIL: gl.constexpr, NEGATIVE_SCALE: gl.constexpr, WITH_LSE: gl.constexpr,
    OVERLAP: gl.constexpr, PINGPONG: gl.constexpr, LONGEST_FIRST: gl.constexpr, QUEUE: gl.constexpr, LATE_RESCALE: gl.constexpr,
    NAMED_RELEASE: gl.constexpr, OUT_TILES: gl.constexpr,
):  # fmt: skip
    """A consumer's warpgroup: 64 queries of every tile, from the first product to the store of the output."""
    q_tiles, k_tiles, v_tiles = tiles
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    places, place_full = line
    batch_heads, seq_q, seq_kv, window, heads_per_section, tile_count = sizes
    program, programs = gl.program_id(0), gl.num_programs(0)
    BLOCK_Q: gl.constexpr = CONSUMERS * ROWS
    ELEMENT: gl.constexpr = q_tiles.dtype
    # One m64nNk16 product of a warpgroup: warp w holds rows 16 w to 16 w + 15. P has the same rows, so that it goes from one product into
    # the next as a register operand, without a shuffle (FlashAttention-3, section 3.2).
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_KV, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    MINE: gl.constexpr = TURN + WHICH
    NEXT: gl.constexpr = TURN + (WHICH + 1) % CONSUMERS
    if PINGPONG and WHICH == CONSUMERS - 1:
        named_barrier(NEXT, "arrive", 256, 4)  # the first turn is consumer 0's

    column = gl.arange(0, BLOCK_KV, layout=gl.SliceLayout(0, s_layout))
    nothing = gl.zeros([ROWS, BLOCK_KV], gl.float32, s_layout)
    q_tile = q_tiles.index(WHICH).reshape([ROWS, D])
    out_tile = o_tiles.index(WHICH)
    step = 0  # K and V tiles done so far, as the producer counts them
    turn = 0
    place = program
    head, first_row, end, diagonal, steady, low = tile_at(
        place, batch_heads, seq_q, seq_kv, window, heads_per_section, tile_count,
        BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW, LONGEST_FIRST,
    )  # fmt: skip
    while place < tile_count:
        row = first_row + WHICH * ROWS + gl.arange(0, ROWS, layout=s_rows)
        at_key = seq_kv - seq_q + row
        acc = gl.zeros([ROWS, DV], gl.float32, o_layout)  # o, unnormalised
        total = share_sums(nothing)  # l, in shares
        top = gl.full([ROWS], float("-inf"), gl.float32, s_rows)  # m, in bits

        block = end - 1
        if CAUSAL:
            # Blocks that only other consumers' queries see: let go by, in turn.
            nearest = max(min(block, max(seq_kv - seq_q + first_row + WHICH * ROWS + ROWS - 1, 0) // BLOCK_KV), low)
            for _ in range(block - nearest):
                stage = step % STAGES
                parity = (step // STAGES) & 1
                if PINGPONG:
                    named_barrier(MINE, "sync", 256, 4)
                    named_barrier(NEXT, "arrive", 256, 4)
                mbarrier.wait(k_full.index(stage), parity)
                release(k_empty, stage, RELEASE, NAMED_RELEASE, CONSUMERS)
                mbarrier.wait(v_full.index(stage), parity)
                release(v_empty, stage, RELEASE + STAGES, NAMED_RELEASE, CONSUMERS)
                step += 1
            block = nearest

        # The first block of keys: its scores and their softmax. Its product with V is made one step later, and so on for every block.
        stage = step % STAGES
        mbarrier.wait(q_full.index(WHICH), turn & 1)
        mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
        if PINGPONG:
            named_barrier(MINE, "sync", 256, 4)
        k_tile = k_tiles.index(stage).reshape([BLOCK_KV, D]).permute((1, 0))
        s = warpgroup_mma(q_tile, k_tile, nothing, use_acc=False, is_async=True)
        if PINGPONG:
            named_barrier(NEXT, "arrive", 256, 4)
        s = warpgroup_mma_wait(0, deps=(s,))
        release(k_empty, stage, RELEASE, NAMED_RELEASE, CONSUMERS)
        first_key = block * BLOCK_KV
        if CAUSAL or TAIL:
            s = hidden(s, at_key - first_key, column, seq_kv - first_key, window, CAUSAL, WINDOW, NEGATIVE_SCALE)
        weights, alpha, top, total = softmax_step(s, top, total, scale_log2, CAUSAL, NEGATIVE_SCALE)
        p = gl.convert_layout(weights.to(ELEMENT), p_layout)

        for _ in range(block - low):
            block -= 1
            first_key = block * BLOCK_KV
            v_stage = step % STAGES
            v_parity = (step // STAGES) & 1
            step += 1
            stage = step % STAGES
            k_tile = k_tiles.index(stage).reshape([BLOCK_KV, D]).permute((1, 0))
            v_tile = v_tiles.index(v_stage).reshape([BLOCK_KV, DV])
            if OVERLAP:
                # Scores of this block, then weights of the last one times V: the softmax of the former runs beside the latter.
                mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
                if PINGPONG:
                    named_barrier(MINE, "sync", 256, 4)
                s = warpgroup_mma(q_tile, k_tile, nothing, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(v_stage), v_parity)
                if LATE_RESCALE:
                    acc = acc * gl.convert_layout(alpha, o_rows)[:, None]
                acc = warpgroup_mma(p, v_tile, acc, is_async=True)
                if PINGPONG:
                    named_barrier(NEXT, "arrive", 256, 4)
                s = warpgroup_mma_wait(1, deps=(s,))
                release(k_empty, stage, RELEASE, NAMED_RELEASE, CONSUMERS)
                if CAUSAL:
                    if (block >= diagonal) | (block < steady):
                        s = hidden(
                            s, at_key - first_key, column, seq_kv - first_key, window, CAUSAL, WINDOW, NEGATIVE_SCALE
                        )  # fmt: skip
                weights, alpha, top, total = softmax_step(s, top, total, scale_log2, CAUSAL, NEGATIVE_SCALE)
                pin(total)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                release(v_empty, v_stage, RELEASE + STAGES, NAMED_RELEASE, CONSUMERS)
            else:
                # The same steps, each after the other.
                mbarrier.wait(v_full.index(v_stage), v_parity)
                if PINGPONG:
                    named_barrier(MINE, "sync", 256, 4)
                if LATE_RESCALE:
                    acc = acc * gl.convert_layout(alpha, o_rows)[:, None]
                acc = warpgroup_mma(p, v_tile, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                release(v_empty, v_stage, RELEASE + STAGES, NAMED_RELEASE, CONSUMERS)
                mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
                s = warpgroup_mma(q_tile, k_tile, nothing, use_acc=False, is_async=True)
                if PINGPONG:
                    named_barrier(NEXT, "arrive", 256, 4)
                s = warpgroup_mma_wait(0, deps=(s,))
                release(k_empty, stage, RELEASE, NAMED_RELEASE, CONSUMERS)
                if CAUSAL:
                    if (block >= diagonal) | (block < steady):
                        s = hidden(
                            s, at_key - first_key, column, seq_kv - first_key, window, CAUSAL, WINDOW, NEGATIVE_SCALE
                        )  # fmt: skip
                weights, alpha, top, total = softmax_step(s, top, total, scale_log2, CAUSAL, NEGATIVE_SCALE)
            p = gl.convert_layout(weights.to(ELEMENT), p_layout)
            if not LATE_RESCALE:
                acc = acc * gl.convert_layout(alpha, o_rows)[:, None]

        # The last product with V. No product reads Q any more: where the output has a place of its own, the next Q may come now.
        if OUT_TILES:
            mbarrier.arrive(q_empty.index(WHICH))
        stage = step % STAGES
        mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
        if LATE_RESCALE:
            acc = acc * gl.convert_layout(alpha, o_rows)[:, None]
        acc = warpgroup_mma(p, v_tiles.index(stage).reshape([BLOCK_KV, DV]), acc, is_async=True)
        # Beside it: where the next tile is, a handful of divisions, and what is left to know of this one.
        head_q = head % heads_q
        batch = head // heads_q
        lse_row = head.to(gl.int64) * seq_q + row
        out_row = first_row + WHICH * ROWS
        if QUEUE:
            place = told(places, place_full, turn)
        else:
            place = position(turn + 1, program, programs, LONGEST_FIRST)
        head, first_row, end, diagonal, steady, low = tile_at(
            place, batch_heads, seq_q, seq_kv, window, heads_per_section, tile_count,
            BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW, LONGEST_FIRST,
        )  # fmt: skip
        pin_indices(batch | head_q | head | first_row | end | diagonal | steady | low)
        # A query that saw no key has total 0 and top -inf: its output is 0, its log-sum-exp -inf.
        whole = gl.convert_layout(gl.sum(total, 1), s_rows)
        divisor = gl.where(whole > 0.0, whole, 1.0)
        if WITH_LSE:
            gl.store(lse + lse_row, (top + gl.log2(divisor)) * LN_2, mask=row < seq_q)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        release(v_empty, stage, RELEASE + STAGES, NAMED_RELEASE, CONSUMERS)
        step += 1
        acc = acc * gl.convert_layout(1.0 / divisor, o_rows)[:, None]
        if OUT_TILES:
            store_wait(0)  # the store of the tile before has read its place
            partition_barrier()
        out_tile.reshape([ROWS, DV]).store(acc.to(ELEMENT))
        fence_async_shared()
        store_tile(o, [batch, head_q, out_row, 0], out_tile)
        if not OUT_TILES:
            store_wait(0)
            mbarrier.arrive(q_empty.index(WHICH))
        turn += 1
    store_wait(0)  # a block's shared memory must outlive the stores that read it


@gluon.jit(do_not_specialize=COUNTS)
def flash_v3_kernel(
    q, k, v, o,  # tensor descriptors of (batch, heads, seq, head dim), with boxes of ROWS, BLOCK_KV, BLOCK_KV and ROWS positions
    lse,  # pointer to contiguous (batch, heads_q, seq_q), or None unless WITH_LSE
    queue,  # pointer to an int32 0, which it is again at the end, or None unless QUEUE
    batch_heads, heads_q, heads_per_kv_head, seq_q, seq_kv, window, heads_per_section, tile_count,
    scale_log2,  # scale * log2(e): scores are in bits from here on
    CONSUMERS: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,  # head dimensions as the tiles hold them
    BLOCK_KV: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, TAIL: gl.constexpr, NEGATIVE_SCALE: gl.constexpr, WITH_LSE: gl.constexpr,
    OVERLAP: gl.constexpr, PINGPONG: gl.constexpr, LONGEST_FIRST: gl.constexpr, QUEUE: gl.constexpr, LATE_RESCALE: gl.constexpr,
    NAMED_RELEASE: gl.constexpr, OUT_TILES: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    q_tiles = gl.allocate_shared_memory(q.dtype, [CONSUMERS, 1, 1, ROWS, D], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BLOCK_KV, D], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, BLOCK_KV, DV], v.layout)
    o_tiles = q_tiles
    if OUT_TILES:
        o_tiles = gl.allocate_shared_memory(o.dtype, [CONSUMERS, 1, 1, ROWS, DV], o.layout)
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], layout)
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    places = gl.allocate_shared_memory(gl.int32, [2, 1], layout)
    place_full = gl.allocate_shared_memory(gl.int64, [2, 1], layout)
    for i in gl.static_range(2):
        mbarrier.init(place_full.index(i), count=1)
    for c in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(c), count=1)
        mbarrier.init(q_empty.index(c), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    fence_async_shared()

    sources, tiles = (q, k, v), (q_tiles, k_tiles, v_tiles)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    line = (places, place_full)
    sizes = (batch_heads, seq_q, seq_kv, window, heads_per_section, tile_count)
    # A tuple that is given a name turns its constants into values, so they are written out for each role.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (o, lse, tiles, o_tiles, barriers, line, sizes, heads_q, scale_log2, 0, CONSUMERS, D, DV, BLOCK_KV, STAGES, CAUSAL, WINDOW, TAIL, NEGATIVE_SCALE, WITH_LSE, OVERLAP, PINGPONG, LONGEST_FIRST, QUEUE, LATE_RESCALE, NAMED_RELEASE, OUT_TILES)),
                (consume, (o, lse, tiles, o_tiles, barriers, line, sizes, heads_q, scale_log2, 1, CONSUMERS, D, DV, BLOCK_KV, STAGES, CAUSAL, WINDOW, TAIL, NEGATIVE_SCALE, WITH_LSE, OVERLAP, PINGPONG, LONGEST_FIRST, QUEUE, LATE_RESCALE, NAMED_RELEASE, OUT_TILES)),
                (produce, (sources, tiles, barriers, line, queue, sizes, heads_q, heads_per_kv_head, CONSUMERS, BLOCK_KV, STAGES, CAUSAL, WINDOW, LONGEST_FIRST, QUEUE, NAMED_RELEASE)),
            ],
            [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (o, lse, tiles, o_tiles, barriers, line, sizes, heads_q, scale_log2, 0, CONSUMERS, D, DV, BLOCK_KV, STAGES, CAUSAL, WINDOW, TAIL, NEGATIVE_SCALE, WITH_LSE, OVERLAP, PINGPONG, LONGEST_FIRST, QUEUE, LATE_RESCALE, NAMED_RELEASE, OUT_TILES)),
                (consume, (o, lse, tiles, o_tiles, barriers, line, sizes, heads_q, scale_log2, 1, CONSUMERS, D, DV, BLOCK_KV, STAGES, CAUSAL, WINDOW, TAIL, NEGATIVE_SCALE, WITH_LSE, OVERLAP, PINGPONG, LONGEST_FIRST, QUEUE, LATE_RESCALE, NAMED_RELEASE, OUT_TILES)),
                (consume, (o, lse, tiles, o_tiles, barriers, line, sizes, heads_q, scale_log2, 2, CONSUMERS, D, DV, BLOCK_KV, STAGES, CAUSAL, WINDOW, TAIL, NEGATIVE_SCALE, WITH_LSE, OVERLAP, PINGPONG, LONGEST_FIRST, QUEUE, LATE_RESCALE, NAMED_RELEASE, OUT_TILES)),
                (produce, (sources, tiles, barriers, line, queue, sizes, heads_q, heads_per_kv_head, CONSUMERS, BLOCK_KV, STAGES, CAUSAL, WINDOW, LONGEST_FIRST, QUEUE, NAMED_RELEASE)),
            ],
            [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
