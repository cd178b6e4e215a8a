"""FlashAttention-3, backward, for Hopper (sm_90), in Gluon: the five products of flash_v2_backward.py in one pass, on a machine that works
asynchronously.

Each program owns a block of keys and walks over the blocks of queries that see it, of all heads that share it:

    S^T = K Q^T    P^T = exp2(scale log2(e) S^T - lse)    dP^T = V dO^T    dS^T = P^T * (dP^T - delta)
    dV += P^T dO   dK += dS^T Q                           dQ = dS K, added up in memory

- Roles. As in flash_v3.py: one warp, the producer, asks the copy engine (TMA) for K and V once, then for Q and dO with their log-sum-exp and
  delta, STAGES blocks ahead. Two warpgroups, the consumers, own 64 keys each, with dK and dV in registers: 128 a thread at head dimension 128.
- Transposed scores. S^T and dP^T come out of a product with the keys as rows, as the left operands of the products for dV and dK have
  them: P and dS go from one product into the next in registers, and dO and Q are read from shared memory as they lie (FlashAttention-3 swaps
  them so too).
- dQ sums over keys, which no consumer has all of. Both leave their dS in shared memory, meet (EXCHANGE), and make half of the block's dQ each:
  half of its channels where a step takes 64 queries (HALVES 1), one of its two halves where it takes 128 (HALVES 2). It leaves through shared
  memory as one reduction of the copy engine (cp.reduce.async.bulk) into fp32 zeros, in whatever order the programs come: its last
  bits differ from call to call. The zeros come from the pre-pass (flash_v2_delta.py), and flash_v3_sums.py makes dQ of the sums. Without
  dQ (WITH_DQ) the kernel's results have the same bits every time, and another kernel makes dQ.
- Overlap, of one step. Beside dP runs the softmax (no maximum is needed: P comes from the log-sum-exp at once); beside dV the multiplication
  for dS; beside dK the meeting; beside dQ Q and dO are given back; beside the next block's scores, asked for before this step ends, the store of
  dQ and the wait for the next dO. With HALVES 2 the other half's scores run beside the first softmax too, and the first half's dK beside the
  second. What each wait needs is asked for first, so no pin is needed as in flash_v3.py: tests/kernels/test_flash_v3_backward_compiled.py
  reads the machine code to see that the assembler kept it so.
- At the end of a step a consumer has nothing under way. Carried around the loop, products in flight make ptxas serialise every one of
  them ("non wgmma instructions reading accumulator registers", Triton 3.6).
- Masks run in loops of their own: the diagonal's blocks come first, then all that need none, then those at a window's far edge, or, where the
  last keys of the block do not exist, all. Queries that do not exist need none: the pre-pass gives them lse = +inf, so weight 0.

The barriers cannot lock. The producer fills block j of the ring when both consumers have given back block j - STAGES, Q and dO by themselves.
A consumer that waits for the Q of block j holds no more than the Q and dO of block j - 1 (with dQ, nothing), so STAGES must be 2 at least; one
that waits for the dO of block j holds the Q of block j too, which came before. Consumers meet once a step, after the same waits. dS has two
places: who writes that of step j + 2 has met the other after it had read that of step j. (tests/kernels/v3_emulator.py runs it so.)

Cost of one call, in the letters of flash_v2_backward.py: 10 B H N M d FLOPs, half of it causal, and B H N M exponentials; HBM bytes as its one pass;
the L2 adds up 4 B H N d bytes for each block of 128 keys. A step of 64 queries at d = 128 is 2,560 clocks of products on a multiprocessor,
two times 256 of exponentials, and about 184 KiB through shared memory, 1,440 clocks of it. Shared memory, bf16: K and V 64 KiB, two stages of Q and
dO 64, dS 32, dQ 32 at d = 128.

Sources: Shah et al., arXiv 2407.08608, section 3 and appendix B; Dao-AILab/flash-attention, hopper/ (which operands are swapped, tile sizes, the
order of a step); Dao, arXiv 2307.08691, algorithm 2. What it was to bring, and brought, stands in docs/flash-v3.md.
"""

from __future__ import annotations

from flashbench.kernels import schedule
from flashbench.kernels.flash_v2_delta import ROW_PADDING
from flashbench.kernels.flash_v3_barriers import named_barrier
from flashbench.kernels.gluon_names import (
    add_tile,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    partition_barrier,
    product_under_way,
    store_tile,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)

KEYS: gl.constexpr = gl.constexpr(64)  # of a consumer: as many rows as one warpgroup's matrix product has
HALF: gl.constexpr = gl.constexpr(64)  # queries whose weights are in registers at one time: a block, or half of one
PADDING: gl.constexpr = gl.constexpr(ROW_PADDING)
EXCHANGE: gl.constexpr = gl.constexpr(8)  # the named barrier where consumers meet
COUNTS = ("batch_heads", "heads_kv", "heads_per_kv_head", "seq_q", "seq_kv", "window", "sections")

# The same source, compiled by Gluon: a kernel of one language may not count on calling functions of the other.
dealt_by_length = gluon.jit(schedule.dealt_by_length.fn)
dealt = gluon.jit(schedule.dealt.fn)
query_ranges = gluon.jit(schedule.query_ranges.fn)


@gluon.jit
def query_blocks(
    first_key, seq_q, seq_kv, window, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr
):  # fmt: skip
    """Blocks of queries for the keys from `first_key` on: low <= steady <= edge <= end. Those from steady to edge need no mask.

    Queries are counted as if the last block were whole: a row that does not exist has weight 0, whatever it sees.
    """
    padded_q = gl.cdiv(seq_q, BLOCK_Q) * BLOCK_Q
    last_key = min(first_key + BLOCK_KV, seq_kv) - 1
    first, steady_first, steady_last, last = query_ranges(
        first_key, last_key, seq_kv - seq_q, padded_q, window, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW
    )
    low = first // BLOCK_Q
    end = max(gl.cdiv(last, BLOCK_Q), low)
    steady = min(max(steady_first // BLOCK_Q, low), end)
    if CAUSAL and last_key - first_key + 1 < BLOCK_KV:
        steady = end  # keys that do not exist are masked by the loop at the diagonal
    return low, steady, min(max(steady_last // BLOCK_Q, steady), end), end


@gluon.jit
def visible_queries(reach, column, key, seq_kv, window, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """Which queries of a block see which keys, (keys, queries): `visible` of schedule.py, turned.

    `reach` is where, counted from the block's first query, the first one stands that sees the key. As in flash_v3_schedule.py, what differs
    by thread moves to the other side, so that the compiler knows the columns.
    """
    if CAUSAL:
        first = reach[:, None] - (column & 6)[None, :]
        known = (column & ~6)[None, :]
        seen = known >= first
        if WINDOW:
            seen = seen & (known < first + window)
    else:
        seen = (key < seq_kv)[:, None] & (column >= 0)[None, :]
    return seen


@gluon.jit
def produce(
    sources, tiles, barriers, sizes,
    CONSUMERS: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """The producer's warp: K and V once, then Q and dO of every block of queries, each with its number a row."""
    q, k, v, d_out, lse_bits, delta = sources
    q_tiles, k_tiles, v_tiles, d_out_tiles, lse_tiles, delta_tiles = tiles
    k_full, v_full, q_full, q_empty, d_out_full, d_out_empty = barriers
    batch_heads, heads_kv, group, seq_q, seq_kv, window, sections = sizes
    BLOCK_Q: gl.constexpr = HALVES * HALF
    BLOCK_KV: gl.constexpr = CONSUMERS * KEYS
    head, key_block = dealt(gl.program_id(0), batch_heads, gl.cdiv(seq_kv, BLOCK_KV), sections, 1, CAUSAL)
    batch = head // heads_kv
    head_kv = head % heads_kv
    first_key = key_block * BLOCK_KV
    low, _, _, end = query_blocks(first_key, seq_q, seq_kv, window, BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW)

    mbarrier.expect(k_full.index(0), CONSUMERS * k.block_type.nbytes)
    for c in gl.static_range(CONSUMERS):
        load_tile(k, [batch, head_kv, first_key + c * KEYS, 0], k_full.index(0), k_tiles.index(c))
    mbarrier.expect(v_full.index(0), CONSUMERS * v.block_type.nbytes)
    for c in gl.static_range(CONSUMERS):
        load_tile(v, [batch, head_kv, first_key + c * KEYS, 0], v_full.index(0), v_tiles.index(c))
    step = 0
    for member in range(group):
        head_q = head_kv * group + member
        one_head = head * group + member
        for block in range(low, end):
            stage = step % STAGES
            free = (step // STAGES & 1) ^ 1
            mbarrier.wait(q_empty.index(stage), free)
            mbarrier.expect(q_full.index(stage), HALVES * (q.block_type.nbytes + lse_bits.block_type.nbytes))
            for h in gl.static_range(HALVES):
                row = block * BLOCK_Q + h * HALF
                load_tile(q, [batch, head_q, row, 0], q_full.index(stage), q_tiles.index(stage * HALVES + h))
                load_tile(lse_bits, [one_head, row], q_full.index(stage), lse_tiles.index(stage * HALVES + h))
            mbarrier.wait(d_out_empty.index(stage), free)
            mbarrier.expect(d_out_full.index(stage), HALVES * (d_out.block_type.nbytes + delta.block_type.nbytes))
            for h in gl.static_range(HALVES):
                row = block * BLOCK_Q + h * HALF
                load_tile(
                    d_out, [batch, head_q, row, 0], d_out_full.index(stage), d_out_tiles.index(stage * HALVES + h)
                )
                load_tile(delta, [one_head, row], d_out_full.index(stage), delta_tiles.index(stage * HALVES + h))
            step += 1
    # Behind the last a block with nothing in it, so that consumers wait for the next one without asking whether there is any.
    stage = step % STAGES
    free = (step // STAGES & 1) ^ 1
    mbarrier.wait(q_empty.index(stage), free)
    mbarrier.arrive(q_full.index(stage))
    mbarrier.wait(d_out_empty.index(stage), free)
    mbarrier.arrive(d_out_full.index(stage))


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


@gluon.jit(do_not_specialize=COUNTS)
def flash_v3_backward_kernel(
    q, k, v, d_out,  # descriptors of (batch, heads, seq, head dim), with boxes of HALF, KEYS, KEYS and HALF positions
    lse_bits, delta,  # descriptors of (batch * heads_q, padded seq_q), of the pre-pass, with boxes of HALF
    dq_sums,  # descriptor of fp32 zeros (batch, heads_q, seq_q, head dim), or None unless WITH_DQ
    dk, dv,  # descriptors of (batch, heads_kv, seq_kv, head dim), with boxes of KEYS positions
    batch_heads, heads_kv, heads_per_kv_head, seq_q, seq_kv, window, sections,
    scale, scale_log2,
    CONSUMERS: gl.constexpr, D: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, TAIL: gl.constexpr, WITH_DQ: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    q_tiles = gl.allocate_shared_memory(q.dtype, [STAGES * HALVES, 1, 1, HALF, D], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [CONSUMERS, 1, 1, KEYS, D], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [CONSUMERS, 1, 1, KEYS, D], v.layout)
    d_out_tiles = gl.allocate_shared_memory(d_out.dtype, [STAGES * HALVES, 1, 1, HALF, D], d_out.layout)
    lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES * HALVES, 1, HALF], lse_bits.layout)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES * HALVES, 1, HALF], delta.layout)
    d_s_tiles = q_tiles
    dq_tiles = q_tiles
    if WITH_DQ:
        d_s_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, HALF], q.dtype)
        d_s_tiles = gl.allocate_shared_memory(q.dtype, [2 * HALVES * CONSUMERS, KEYS, HALF], d_s_layout)
        dq_tiles = gl.allocate_shared_memory(
            gl.float32, [CONSUMERS, 1, 1, HALF, dq_sums.block_type.shape[3]], dq_sums.layout
        )
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [1, 1], layout)
    v_full = gl.allocate_shared_memory(gl.int64, [1, 1], layout)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    d_out_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    d_out_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    mbarrier.init(k_full.index(0), count=1)
    mbarrier.init(v_full.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(d_out_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=CONSUMERS)
        mbarrier.init(d_out_empty.index(i), count=CONSUMERS)
    fence_async_shared()

    sources = (q, k, v, d_out, lse_bits, delta)
    tiles = (q_tiles, k_tiles, v_tiles, d_out_tiles, lse_tiles, delta_tiles)
    barriers = (k_full, v_full, q_full, q_empty, d_out_full, d_out_empty)
    sizes = (batch_heads, heads_kv, heads_per_kv_head, seq_q, seq_kv, window, sections)
    gl.warp_specialize(
        [
            (consume, (dq_sums, dk, dv, tiles, d_s_tiles, dq_tiles, barriers, sizes, scale, scale_log2, 0, CONSUMERS, D, HALVES, STAGES, CAUSAL, WINDOW, TAIL, WITH_DQ)),
            (consume, (dq_sums, dk, dv, tiles, d_s_tiles, dq_tiles, barriers, sizes, scale, scale_log2, 1, CONSUMERS, D, HALVES, STAGES, CAUSAL, WINDOW, TAIL, WITH_DQ)),
            (produce, (sources, tiles, barriers, sizes, CONSUMERS, HALVES, STAGES, CAUSAL, WINDOW)),
        ],
        [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
