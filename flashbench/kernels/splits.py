"""Into how many parts the decoding kernel cuts the keys of a sequence: arithmetic on the device's limits, which waits for nothing.

One query against a long cache reads all of it and computes next to nothing, so that only enough programs, each with enough loads under
way, reach the memory's bandwidth. Batch times heads is often too few of them; the keys are the axis that is left (Flash-Decoding).
"""

from __future__ import annotations

from dataclasses import replace

from flashbench.kernels.blocks import BlockShape, family, padded

MAX_ROWS = 64
"""Rows of a query tile at most; more queries x heads of a group than that are taken in several tiles, each of which reads the cache."""
SPLIT_KEYS = 256
"""Keys to a split at the least, roughly: below this, starting a program and adding up the parts takes longer than the keys do."""
MAX_WAVES = 4
"""More rounds of programs than this even out by themselves."""
FULL = 0.9
"""Share of the device's places that is as good as all of them: the memory is busy before the last place is taken."""


def decode_shared_bytes(
    blocks: BlockShape, capability: tuple[int, int] | None, dtype: str, head_dim: int, head_dim_v: int
) -> int:
    """Shared memory of one program of the decoding kernel, from above: queries, weights, and K and V tiles under way or in use.

    A tile of fewer than 64 rows goes through registers into the matrix unit, and its place is free for the load of one stage later; from
    64 rows on the unit of sm_90 and later reads shared memory by itself, and each stage has a place of its own.
    """
    d, dv = padded(head_dim), padded(head_dim_v)
    asynchronous = blocks.block_q >= 64 and family(capability) in ("sm_90", "sm_100")
    places = max(1, blocks.num_stages - (not asynchronous))
    elements = blocks.block_q * (d + blocks.block_kv) + places * blocks.block_kv * (d + dv)
    if asynchronous and dtype == "tf32":
        elements += blocks.block_kv * 2 * dv  # V passes through it transposed, too
    reductions_and_barriers = 4096
    return elements * (4 if dtype in ("fp32", "tf32") else 2) + reductions_and_barriers


def tallest_shared_bytes(
    blocks: BlockShape, capability: tuple[int, int] | None, dtype: str, head_dim: int, head_dim_v: int
) -> int:
    """The same for MAX_ROWS rows: a shape is chosen before the rows are known."""
    return decode_shared_bytes(replace(blocks, block_q=MAX_ROWS), capability, dtype, head_dim, head_dim_v)


def split_count(units: int, keys: int, block_kv: int, slots: int) -> int:
    """Splits of `keys` keys for each of `units` (sequence, key/value head) pairs on a device that runs `slots` programs at a time.

    The fewest whole waves that leave hardly a place empty, and no split much below SPLIT_KEYS keys or a block. Splits differ by a block
    at most; of the counts whose longest split is the same, the least.
    """
    blocks = -(-keys // block_kv)
    most = min(blocks, -(-keys // SPLIT_KEYS))
    best, best_share = 1, 0.0
    for waves in range(1, MAX_WAVES + 1):
        splits = min(most, waves * slots // units)
        if splits < 1:
            continue
        programs = units * splits
        share = programs / (-(-programs // slots) * slots)
        if share > best_share:
            best, best_share = splits, share
        if best_share >= FULL:
            break
    longest = -(-blocks // best)
    return -(-blocks // longest)
