"""The producer of flash-v3, one warp: decides on the tiles of its program, tells the consumers, and asks the copy engine for what they will need."""

from __future__ import annotations

from flashbench.kernels.flash_v3_barriers import RELEASE, await_release
from flashbench.kernels.flash_v3_queue import drawn, tell
from flashbench.kernels.flash_v3_schedule import ROWS, position, tile_at
from flashbench.kernels.gluon_names import gl, gluon, load_tile, mbarrier


@gluon.jit
def announce(
    place, turn, told_tiles, told_full, sizes, heads_q, heads_per_kv_head, tile_count,
    BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, LONGEST_FIRST: gl.constexpr,
):  # fmt: skip
    """Tell the consumers of the tile at a place of the list, or that there is none, and give (batch, head_q, first_row, end, low)."""
    batch_heads, seq_q, seq_kv, window, sections = sizes
    head, first_row, end, diagonal, steady, low = tile_at(
        place, batch_heads, seq_q, seq_kv, window, sections, heads_per_kv_head, tile_count,
        BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW, LONGEST_FIRST,
    )  # fmt: skip
    if place >= tile_count:
        end = 0
    batch = head // heads_q
    head_q = head % heads_q
    tell(told_tiles, told_full, turn, batch, head_q, first_row, end, diagonal, steady, low)
    return batch, head_q, first_row, end, low


@gluon.jit
def produce(
    sources, tiles, barriers, told_tiles, told_full, queue, sizes, heads_q, heads_per_kv_head, tile_count,
    CONSUMERS: gl.constexpr, BLOCK_KV: gl.constexpr, STAGES: gl.constexpr, Q_PLACES: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, LONGEST_FIRST: gl.constexpr, QUEUE: gl.constexpr, NAMED_RELEASE: gl.constexpr,
):  # fmt: skip
    """The producer's warp: decides on the tiles, and loads what the consumers are going to need, as far ahead as there is room."""
    q, k, v = sources
    q_tiles, k_tiles, v_tiles = tiles
    FP8: gl.constexpr = v.dtype == gl.float8e4nv
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    program, programs = gl.program_id(0), gl.num_programs(0)
    BLOCK_Q: gl.constexpr = CONSUMERS * ROWS
    step = 0  # K and V tiles loaded so far, over all tiles of queries: the ring goes on from one to the next
    turn = 0
    place = program
    batch, head_q, first_row, end, low = announce(
        place, turn, told_tiles, told_full, sizes, heads_q, heads_per_kv_head, tile_count,
        BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW, LONGEST_FIRST,
    )  # fmt: skip
    while end > 0:
        head_kv = head_q // heads_per_kv_head
        for c in gl.static_range(CONSUMERS):
            at = turn % Q_PLACES * CONSUMERS + c
            mbarrier.wait(q_empty.index(at), (turn // Q_PLACES & 1) ^ 1)
            mbarrier.expect(q_full.index(at), q.block_type.nbytes)
            load_tile(q, [batch, head_q, first_row + c * ROWS, 0], q_full.index(at), q_tiles.index(at))
        here = batch
        for block in range(end - 1, low - 1, -1):
            if block == low:
                # Before the last block, for which there is no room yet: late, so that nobody holds a tile that another could begin, and while
                # the answer of a queue travels, the consumers are busy.
                if QUEUE:
                    place = drawn(queue, programs, tile_count)
                else:
                    place = position(turn + 1, program, programs, LONGEST_FIRST)
                batch, head_q, first_row, end, low = announce(
                    place, turn + 1, told_tiles, told_full, sizes, heads_q, heads_per_kv_head, tile_count,
                    BLOCK_Q, BLOCK_KV, CAUSAL, WINDOW, LONGEST_FIRST,
                )  # fmt: skip
            key = block * BLOCK_KV
            stage = step % STAGES
            lap = step // STAGES
            await_release(k_empty, stage, RELEASE, lap, NAMED_RELEASE, CONSUMERS)
            mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
            load_tile(k, [here, head_kv, key, 0], k_full.index(stage), k_tiles.index(stage))
            await_release(v_empty, stage, RELEASE + STAGES, lap, NAMED_RELEASE, CONSUMERS)
            mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
            if FP8:
                load_tile(v, [here, head_kv, 0, key], v_full.index(stage), v_tiles.index(stage))
            else:
                load_tile(v, [here, head_kv, key, 0], v_full.index(stage), v_tiles.index(stage))
            step += 1
        turn += 1
