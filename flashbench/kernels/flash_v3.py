"""FlashAttention-3, forward, for Hopper (sm_90), in Gluon: the same online softmax as flash_v2.py, on a machine that works asynchronously.

What was left to gain. flash_v2.py does one thing after the other: every warp loads, multiplies, exponentiates. On Hopper the copy engine (TMA)
and the matrix unit (wgmma) work by themselves once one thread has asked, and a multiprocessor has 4,096 FLOP a clock of products but only 16
exponentials: at head dimension 128 the exponentials of a block take half as long as its two products, at 64 as long, and in v2 much of that
time the matrix unit waits. FlashAttention-3 (Shah et al., arXiv 2407.08608) hides them. This kernel is that story, each step a switch of
flash_v3_designs.Design:

- Roles (section 3.1 of the paper). One warp, the producer, does nothing but ask for tiles; two or three warpgroups, the consumers, compute
  64 queries each. They meet at mbarriers in shared memory: full (the bytes have come) and empty (all have read them). The producer runs as
  far ahead as there are places, needs hardly any registers, and gives them to the consumers (setmaxnreg: 240 and 24 where all had 168).
- OVERLAP (section 3.2). A consumer asks for the scores of block j, then for the product of block j - 1's weights with V, waits for the
  former only, and does its softmax beside the latter. The weights never leave the registers: one product's layout is the next one's operand.
- PINGPONG (section 3.1). Consumers take turns at the matrix unit, so that one multiplies while the other exponentiates.
- Persistence. One program per multiprocessor walks over many tiles; the next tile's Q, K and V come while the last one is still written.
- LONGEST_FIRST and QUEUE. Causal tiles differ in length, so they start with the longest (schedule.py), and a program draws its next one when it
  is about to need it (flash_v3_queue.py). The producer does so, and tells the consumers what there is to do.
- CARRY. The first scores of a tile are asked for beside the last product of the tile before it: OVERLAP across the tiles of a program.
- EARLY_WAIT. Of the softmax only the row maxima stand before the wait for the product with V; conversions and the loop's end then run beside
  exponentials, and another warpgroup's products fill the matrix unit. FlashAttention-3's machine code has it so.
- LAZY_RESCALE (FlashAttention-4). The running maximum follows the scores only when they pass it by 8 bits, so that weights are at most 2^8; a
  warp none of whose maxima moved jumps over the multiplication of its output. What is summed up is the same, in other units.
- NAMED_RELEASE is smaller: see Design. What is always there: each thread keeps the sum of its own weights (share_sums), values of a thread are
  reduced in chains beside each other (row_extremes), and a block is masked in a branch that most blocks jump over.

e4m3 tensors (Q, K and V; the output is bf16) take the same way, but for what flash_v3_e4m3.py says.

The barriers cannot lock. Number the blocks of keys over all tiles of a program, 0, 1, 2, ...; all roles count alike. The producer fills Q,
then K_j and V_j in turn, and before it fills block j it waits until every consumer has given back block j - STAGES. A consumer that waits
for K_j has given back every K before it and every V but the last, so nothing that the producer still needs to fill it (STAGES >= 1); one that
waits for V_(j-1) has given back V_(j-2), and one that waits for the Q of a tile has given back everything (with CARRY all but the last V, whose
place is not needed before that Q has come, as flash_v3_designs.carries sees to). So no wait can be part of a circle.
In ping-pong, all consumers take equally many turns; the one whose turn it is has done the fewest, and what it waits for needs no more of the
others than blocks before j - 1, which they gave back before they asked for their own turn. (tests/kernels/v3_emulator.py runs it so.)

What the assembler must not undo. It reorders around waits as it likes, and would move the wait for the second product up, in front of the
softmax, which silently ends the overlap; `pin` keeps it, and tests/kernels/test_flash_v3_compiled.py reads the machine code to see that it
did. Blocks of keys are taken from the last to the first, so that masks come at the beginning, and at a window's left edge again.

Cost of one call, in the letters of flash_v2.py: the FLOPs, exponentials and least HBM bytes are the same. K and V come from the L2 once for
each tile of 64 queries times the consumers. One program takes, in bf16 at head dimension 128, 192 KiB of shared memory (Q 32, two stages of K
and V 64 each, O 32), and a consumer's thread 64 registers for o, 64 for s and 64 for the weights in use and the next ones.

Sources: the paper; Dao-AILab/flash-attention, hopper/ (tile sizes, registers, RescaleOBeforeGemm) and its pull request 2294 (ping-pong off at
head dimension 128); pull requests 205 to 219, 829, 3506 and 3582 of facebookexperimental/triton, which climb the same ladder in TLX;
FlashAttention-4 (flash_attn/cute of the same project) for the rescaling; the PTX ISA on wgmma, mbarrier, bar and vote. What each step was to
bring, and brought, stands in docs/flash-v3.md.
"""

from __future__ import annotations

from flashbench.kernels.flash_v3_consumer import consume
from flashbench.kernels.flash_v3_producer import produce
from flashbench.kernels.flash_v3_queue import NUMBERS, ROOM
from flashbench.kernels.flash_v3_schedule import ROWS
from flashbench.kernels.gluon_names import fence_async_shared, gl, gluon, mbarrier

COUNTS = ("batch_heads", "heads_q", "heads_per_kv_head", "seq_q", "seq_kv", "window", "sections", "tile_count")


@gluon.jit(do_not_specialize=COUNTS)
def flash_v3_kernel(
    q, k, v, o,  # tensor descriptors of (batch, heads, seq, head dim), with boxes of ROWS, BLOCK_KV, BLOCK_KV and ROWS positions; an e4m3 V is
    # (batch, heads, head dim, seq), its keys in the order of `packed`
    lse,  # pointer to contiguous (batch, heads_q, seq_q), or None unless WITH_LSE
    queue,  # pointer to an int32 0, which it is again at the end, or None unless QUEUE
    descales,  # pointer to contiguous fp32 (batch, heads_kv, 3), of Q, K and V, or None unless they are e4m3
    batch_heads, heads_q, heads_per_kv_head, seq_q, seq_kv, window, sections, tile_count,
    scale_log2,  # scale * log2(e): scores are in bits from here on
    CONSUMERS: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,  # head dimensions as the tiles hold them
    BLOCK_KV: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, TAIL: gl.constexpr, NEGATIVE_SCALE: gl.constexpr, WITH_LSE: gl.constexpr,
    OVERLAP: gl.constexpr, PINGPONG: gl.constexpr, LONGEST_FIRST: gl.constexpr, QUEUE: gl.constexpr, CARRY: gl.constexpr,
    LAZY_RESCALE: gl.constexpr, EARLY_WAIT: gl.constexpr, NAMED_RELEASE: gl.constexpr, OUT_TILES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    Q_PLACES: gl.constexpr = 2 if CARRY else 1
    q_tiles = gl.allocate_shared_memory(q.dtype, [Q_PLACES * CONSUMERS, 1, 1, ROWS, D], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BLOCK_KV, D], k.layout)
    FP8: gl.constexpr = v.dtype == gl.float8e4nv
    v_tiles = gl.allocate_shared_memory(
        v.dtype, [STAGES, 1, 1, DV if FP8 else BLOCK_KV, BLOCK_KV if FP8 else DV], v.layout
    )
    o_tiles = q_tiles
    if OUT_TILES:
        o_tiles = gl.allocate_shared_memory(o.dtype, [CONSUMERS, 1, 1, ROWS, DV], o.layout)
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [Q_PLACES * CONSUMERS, 1], layout)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_PLACES * CONSUMERS, 1], layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    told_tiles = gl.allocate_shared_memory(gl.int32, [ROOM * NUMBERS, 1], layout)
    told_full = gl.allocate_shared_memory(gl.int64, [ROOM, 1], layout)
    for i in gl.static_range(ROOM):
        mbarrier.init(told_full.index(i), count=1)
    for i in gl.static_range(Q_PLACES * CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    fence_async_shared()

    sources, tiles = (q, k, v), (q_tiles, k_tiles, v_tiles)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    sizes = (batch_heads, seq_q, seq_kv, window, sections)
    # A tuple that is given a name turns its constants into values, so they are written out for each role.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (o, lse, tiles, o_tiles, barriers, told_tiles, told_full, seq_q, seq_kv, window, heads_q, heads_per_kv_head, scale_log2, descales, 0, CONSUMERS, D, DV, BLOCK_KV, STAGES, Q_PLACES, CAUSAL, WINDOW, TAIL, NEGATIVE_SCALE, WITH_LSE, OVERLAP, PINGPONG, CARRY, LAZY_RESCALE, EARLY_WAIT, NAMED_RELEASE, OUT_TILES)),
                (consume, (o, lse, tiles, o_tiles, barriers, told_tiles, told_full, seq_q, seq_kv, window, heads_q, heads_per_kv_head, scale_log2, descales, 1, CONSUMERS, D, DV, BLOCK_KV, STAGES, Q_PLACES, CAUSAL, WINDOW, TAIL, NEGATIVE_SCALE, WITH_LSE, OVERLAP, PINGPONG, CARRY, LAZY_RESCALE, EARLY_WAIT, NAMED_RELEASE, OUT_TILES)),
                (produce, (sources, tiles, barriers, told_tiles, told_full, queue, sizes, heads_q, heads_per_kv_head, tile_count, CONSUMERS, BLOCK_KV, STAGES, Q_PLACES, CAUSAL, WINDOW, LONGEST_FIRST, QUEUE, NAMED_RELEASE)),
            ],
            [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (o, lse, tiles, o_tiles, barriers, told_tiles, told_full, seq_q, seq_kv, window, heads_q, heads_per_kv_head, scale_log2, descales, 0, CONSUMERS, D, DV, BLOCK_KV, STAGES, Q_PLACES, CAUSAL, WINDOW, TAIL, NEGATIVE_SCALE, WITH_LSE, OVERLAP, PINGPONG, CARRY, LAZY_RESCALE, EARLY_WAIT, NAMED_RELEASE, OUT_TILES)),
                (consume, (o, lse, tiles, o_tiles, barriers, told_tiles, told_full, seq_q, seq_kv, window, heads_q, heads_per_kv_head, scale_log2, descales, 1, CONSUMERS, D, DV, BLOCK_KV, STAGES, Q_PLACES, CAUSAL, WINDOW, TAIL, NEGATIVE_SCALE, WITH_LSE, OVERLAP, PINGPONG, CARRY, LAZY_RESCALE, EARLY_WAIT, NAMED_RELEASE, OUT_TILES)),
                (consume, (o, lse, tiles, o_tiles, barriers, told_tiles, told_full, seq_q, seq_kv, window, heads_q, heads_per_kv_head, scale_log2, descales, 2, CONSUMERS, D, DV, BLOCK_KV, STAGES, Q_PLACES, CAUSAL, WINDOW, TAIL, NEGATIVE_SCALE, WITH_LSE, OVERLAP, PINGPONG, CARRY, LAZY_RESCALE, EARLY_WAIT, NAMED_RELEASE, OUT_TILES)),
                (produce, (sources, tiles, barriers, told_tiles, told_full, queue, sizes, heads_q, heads_per_kv_head, tile_count, CONSUMERS, BLOCK_KV, STAGES, Q_PLACES, CAUSAL, WINDOW, LONGEST_FIRST, QUEUE, NAMED_RELEASE)),
            ],
            [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
