"""Points put together: which belong to one line, which panels there are, and what their points have in common, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashbench.records import DTYPES, MODES
from flashbench.report.figure import length_text
from flashbench.report.points import Point, RowOfPanels


def lines(points: Sequence[Point]) -> list[tuple[Point, ...]]:
    """The points in lines: all that is equal but for the sequence length, in order of length.

    The batch may vary along a line (a fixed number of tokens); where one length has several, each batch gets a line of its own.
    """
    groups: dict[tuple[Any, ...], list[Point]] = {}
    for point in points:
        groups.setdefault(_line_key(point), []).append(point)
    result: list[tuple[Point, ...]] = []
    for group in groups.values():
        parts: dict[int, list[Point]] = {}
        by_batch = len({(p.seq_q, p.seq_kv) for p in group}) < len(group)
        for point in group:
            parts.setdefault(point.batch if by_batch else 0, []).append(point)
        result.extend(tuple(sorted(part, key=lambda p: (p.seq_len, p.seq_q))) for part in parts.values())
    return sorted(result, key=lambda line: (line[0].provider, DTYPES.index(line[0].dtype), line[0].key))


def _line_key(p: Point) -> tuple[Any, ...]:
    return (
        p.run,
        p.provider,
        p.mode,
        p.dtype,
        p.mask,
        p.head_dim,
        p.head_dim_v,
        p.heads_q,
        p.heads_kv,
        p.page_size,
        p.l2,
        p.regime,
    )


def panels(points: Sequence[Point]) -> tuple[list[RowOfPanels], list[str]]:
    """What tells panels apart, in a fixed order: mode and head dimensions down the page, masks across it."""
    named = {"none": 0, "causal": 1}
    masks = sorted({p.mask for p in points}, key=lambda m: (named.get(m, 2), int(m.partition(":")[2] or 0)))
    return sorted({p.panel_row for p in points}, key=lambda r: (MODES.index(r[0]), r[1:])), masks


def panel_title(row: RowOfPanels, mask: str) -> str:
    """What one panel shows, in words."""
    mode, d, d_v = row
    width = mask.removeprefix("window:")
    mask_text = {"none": "dense", "causal": "causal"}.get(mask, f"window of {width}")
    return f"{mode.replace('_', ' + ')}, head dim {d if d == d_v else f'{d}/{d_v}'}, {mask_text}"


def shapes_text(points: Sequence[Point]) -> str:
    """Batch and heads of the points in words: what is constant over them, else the range."""
    tokens = {p.batch * p.seq_len for p in points}
    batches, heads = sorted({p.batch for p in points}), list(dict.fromkeys(p.heads for p in points))
    widths = {p.heads_q * p.head_dim for p in points}
    if len(batches) == 1:
        batch = f"batch {batches[0]}"
    elif len(tokens) == 1:
        batch = f"batch \u00b7 length = {length_text(tokens.pop())}"
    else:
        batch = f"batch {batches[0]} to {batches[-1]}"
    if len(heads) > 1 and len(widths) == 1:
        return f"{batch}, heads \u00b7 head dim = {widths.pop():,}"
    return f"{batch}, heads {', '.join(heads)}"


def conditions_text(points: Sequence[Point]) -> str:
    """How the rows were taken: shapes, state of the L2, load regime."""
    states = " and ".join(sorted({p.l2 for p in points if p.l2}))
    regimes = " and ".join(sorted({p.regime for p in points if p.regime}))
    words = (shapes_text(points), f"{states} L2" if states else "", regimes)
    return f"Rows: {', '.join(filter(None, words))}."
