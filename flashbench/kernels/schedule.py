"""Who computes what: the block of queries that a program takes, the keys it walks over, and which of them each query sees.

Positions are bottom-right aligned: query i of seq_q stands at key i + seq_kv - seq_q, so the last query stands at the last key.
"""

from __future__ import annotations

import triton
import triton.language as tl


def section_count(heads: int, head_bytes: int, l2_bytes: int) -> int:
    """Sections of `heads` that stream `head_bytes` each, as few as fit a third of the L2. Heads that share keys count as one."""
    return -(-heads // max(1, l2_bytes // 3 // head_bytes))


def mean_keys(seq_q: int, seq_kv: int, window: int | None, *, causal: bool) -> float:
    """Keys that a query sees, on average."""
    seen = seq_kv - min(seq_q, seq_kv) / 2 if causal else seq_kv
    return min(seen, window) if window is not None else seen


@triton.jit
def dealt(place, heads, blocks, sections, group, UNEVEN: tl.constexpr):
    """Which (batch * head, block) has a place in a launch's list of work; `group` heads that follow one another share what they stream.

    A group after the other, block by block. If UNEVEN, blocks of a head being numbered from the longest on: groups are taken a section at a
    time, whose streams fit the L2 together, and inside a section the longest block of all its heads comes first (longest processing time
    first). Sections differ by one group at most, the larger ones last: a small last one would begin with its longest blocks when nothing
    is left to fill the other multiprocessors with. For these the shortest third of the last three sections' blocks is kept. (That of all
    sections would fetch from HBM what the L2 has lost meanwhile: docs/portable-kernels.md.)
    """
    if UNEVEN:
        head, block = dealt_by_length(place, heads, blocks, sections, group)
    else:
        inside = place % (group * blocks)
        head = place // (group * blocks) * group + inside % group
        block = inside // group
    return head, block


@triton.jit
def dealt_by_length(place, heads, blocks, sections, group):
    """`dealt` if UNEVEN."""
    groups = heads // group
    larger = groups % sections
    small = groups // sections * group
    in_small = (sections - larger) * small  # heads of the smaller sections, which come first
    before = tl.maximum(sections - 3, 0)
    # The first head of the last three sections.
    kept_from = before * small + tl.maximum(before + larger - sections, 0) * group
    first = 0
    depth = blocks
    if place >= kept_from * blocks:
        place -= kept_from * blocks
        first = kept_from
        depth = blocks - blocks // 3
    heads_left = heads - first
    behind = place - heads_left * depth
    if behind >= 0:
        head = first + behind % heads_left
        block = depth + behind // heads_left
    else:
        at = first + place // depth
        size = small
        start = 0
        if at >= in_small:
            size = small + group
            start = in_small
        start += (at - start) // size * size
        inside = place - (start - first) * depth
        head = start + inside % size
        block = inside // size
    return head, block


@triton.jit
def assigned(program, heads, q_blocks, sections, group, CAUSAL: tl.constexpr):
    """Which (batch * head, query block) a program takes: everything on grid axis 0, the only one that reaches beyond 65,535.

    A causal head's last query block has the most keys and is its first.
    """
    head, q_block = dealt(program, heads, q_blocks, sections, group, CAUSAL)
    if CAUSAL:
        q_block = q_blocks - 1 - q_block
    return head, q_block


@triton.jit
def key_ranges(first_at, last_at, seq_kv, window, BLOCK_KV: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Bounds low <= steady_low <= steady_high <= high (in keys) for queries that stand at keys first_at to last_at.

    Between the steady bounds, whole blocks are visible to every query; outside low and high no key is visible to any. All but the
    last are multiples of BLOCK_KV.
    """
    low = 0
    steady_low = 0
    high = seq_kv
    steady_high = seq_kv // BLOCK_KV * BLOCK_KV
    if CAUSAL:
        high = tl.maximum(last_at + 1, 0)
        steady_high = tl.maximum(first_at + 1, 0) // BLOCK_KV * BLOCK_KV
    if WINDOW:
        low = tl.maximum(first_at - window + 1, 0) // BLOCK_KV * BLOCK_KV
        steady_low = (
            tl.minimum(tl.cdiv(tl.maximum(last_at - window + 1, 0), BLOCK_KV), tl.cdiv(high, BLOCK_KV)) * BLOCK_KV
        )
        steady_high = tl.maximum(steady_low, steady_high)
    return low, steady_low, steady_high, high


@triton.jit
def query_ranges(
    first_key, last_key, shift, seq_q, window, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Bounds low <= steady_low <= steady_high <= high (in queries) for keys first_key to last_key: `key_ranges` with the sides exchanged.

    Query i stands at key i + shift. Between the steady bounds, whole blocks of queries see every key of a whole block, so that nothing
    is masked; a key block that is not whole has no such queries. Outside low and high no query sees any. An empty range may have its
    bounds the wrong way round. All but the last are multiples of BLOCK_Q.
    """
    low = 0
    steady_low = 0
    high = seq_q
    if CAUSAL:
        low = tl.maximum(first_key - shift, 0) // BLOCK_Q * BLOCK_Q
        steady_low = tl.cdiv(tl.maximum(last_key - shift, 0), BLOCK_Q) * BLOCK_Q
    steady_high = seq_q // BLOCK_Q * BLOCK_Q
    if WINDOW:
        high = tl.minimum(high, tl.maximum(last_key + window - shift, 0))
        steady_high = tl.minimum(steady_high, tl.maximum(first_key + window - shift, 0) // BLOCK_Q * BLOCK_Q)
    steady_low = tl.minimum(steady_low, tl.cdiv(high, BLOCK_Q) * BLOCK_Q)
    if last_key - first_key + 1 < BLOCK_KV:
        steady_high = 0
    return low, steady_low, tl.maximum(steady_low, steady_high), high


@triton.jit
def visible(at_key, key, seq_kv, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which of the keys `key` the queries that stand at `at_key` see, (queries, keys)."""
    if CAUSAL:
        seen = key[None, :] <= at_key[:, None]
        if WINDOW:
            seen = seen & (key[None, :] > at_key[:, None] - window)
    else:
        seen = (key < seq_kv)[None, :]
    return seen
