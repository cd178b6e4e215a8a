"""The mask: which keys a query sees. One definition, for the FLOP and byte models, the reference and the providers.

Query i of `seq_q` sees the keys [first, end) of `seq_kv`. With offset o = seq_kv - seq_q (bottom-right aligned, the convention
here: the last query sees every key) or 0 (top-left, PyTorch's `is_causal`):

    none       [0, seq_kv)
    causal     [0, i + o + 1)
    window:W   [i + o + 1 - W, i + o + 1)      causal; the last W keys, the query's own included

each clipped to [0, seq_kv). A query may see no key at all.
"""

from __future__ import annotations

from typing import Literal

from flashbench.errors import UsageError, nearest
from flashbench.records import parse_mask

Alignment = Literal["bottom-right", "top-left"]


def _shape(mask: str, seq_q: int, seq_kv: int, alignment: str) -> tuple[bool, int | None, int]:
    """Whether the mask hides anything, its window width, and the offset of the diagonal."""
    if alignment not in ("bottom-right", "top-left"):
        hint = nearest(alignment, ("bottom-right", "top-left"))
        raise UsageError(f"unknown alignment '{alignment}'{hint} (known: bottom-right, top-left)")
    mask = parse_mask(mask)
    width = int(mask.removeprefix("window:")) if mask.startswith("window:") else None
    return mask != "none", width, seq_kv - seq_q if alignment == "bottom-right" else 0


def visible_pairs(mask: str, seq_q: int, seq_kv: int, alignment: Alignment = "bottom-right") -> int:
    """Pairs of a query and a key that it sees, for one head: exact, in constant time and without memory.

    A window's pairs are the causal ones less those of the causal mask shifted by W.
    """
    masked, width, offset = _shape(mask, seq_q, seq_kv, alignment)
    if not masked:
        return seq_q * seq_kv

    def causal(o: int) -> int:
        return _clamped_sum(seq_q + o, seq_kv) - _clamped_sum(o, seq_kv)

    return causal(offset) - (causal(offset - width) if width is not None else 0)


def _clamped_sum(x: int, n: int) -> int:
    """Sum of min(max(y, 0), n) over all y <= x."""
    if x <= 0:
        return 0
    if x <= n:
        return x * (x + 1) // 2
    return n * (n + 1) // 2 + (x - n) * n


def visible_range(mask: str, seq_q: int, seq_kv: int, i: int, alignment: Alignment = "bottom-right") -> tuple[int, int]:
    """Keys [first, end) that query `i` sees; first == end when it sees none."""
    masked, width, offset = _shape(mask, seq_q, seq_kv, alignment)
    if not masked:
        return 0, seq_kv
    end = min(max(i + offset + 1, 0), seq_kv)
    first = 0 if width is None else min(max(i + offset + 1 - width, 0), seq_kv)
    return first, end


def seeing_range(mask: str, seq_q: int, seq_kv: int, j: int, alignment: Alignment = "bottom-right") -> tuple[int, int]:
    """Queries [first, end) that see key `j`: the mask read down a column; first == end when none does."""
    masked, width, offset = _shape(mask, seq_q, seq_kv, alignment)
    if not masked:
        return 0, seq_q
    first = min(max(j - offset, 0), seq_q)
    end = seq_q if width is None else min(max(j - offset + width, 0), seq_q)
    return first, end


def key_blocks(
    mask: str, seq_q: int, seq_kv: int, block_q: int, alignment: Alignment = "bottom-right"
) -> list[tuple[int, int]]:
    """Keys [first, end) that each block of `block_q` queries needs, in order. A block's rows see one unbroken range of keys."""

    def edge(i: int) -> tuple[int, int]:
        return visible_range(mask, seq_q, seq_kv, i, alignment)

    return [(edge(row)[0], edge(min(row + block_q, seq_q) - 1)[1]) for row in range(0, seq_q, block_q)]


def query_blocks(
    mask: str, seq_q: int, seq_kv: int, block_kv: int, alignment: Alignment = "bottom-right"
) -> list[tuple[int, int]]:
    """Queries [first, end) that see some key of each block of `block_kv` keys, in order."""

    def edge(j: int) -> tuple[int, int]:
        return seeing_range(mask, seq_q, seq_kv, j, alignment)

    return [(edge(key)[0], edge(min(key + block_kv, seq_kv) - 1)[1]) for key in range(0, seq_kv, block_kv)]


def visible_tiles(
    mask: str, seq_q: int, seq_kv: int, block_q: int, block_kv: int, alignment: Alignment = "bottom-right"
) -> int:
    """Tiles of block_q x block_kv scores in which some pair is visible: what a tiled kernel computes, one head, whole tiles."""
    blocks = key_blocks(mask, seq_q, seq_kv, block_q, alignment)
    return sum(-(-end // block_kv) - first // block_kv for first, end in blocks if end > first)
