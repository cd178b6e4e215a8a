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

from flashbench.kernels.flash_v3_backward_consumer import consume
from flashbench.kernels.flash_v3_backward_producer import produce
from flashbench.kernels.flash_v3_schedule import HALF, KEYS
from flashbench.kernels.gluon_names import fence_async_shared, gl, gluon, mbarrier

COUNTS = ("batch_heads", "heads_kv", "heads_per_kv_head", "seq_q", "seq_kv", "window", "sections")


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
