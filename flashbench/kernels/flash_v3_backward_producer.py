"""The producer of flash-v3's backward pass, one warp: asks the copy engine for a block of keys, then for all queries that see it."""

from __future__ import annotations

from flashbench.kernels.flash_v3_schedule import HALF, KEYS, dealt, query_blocks
from flashbench.kernels.gluon_names import gl, gluon, load_tile, mbarrier


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
