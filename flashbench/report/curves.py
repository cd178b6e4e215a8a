"""Curves over the sequence length: time, memory, HBM traffic or speed-up, in the same panels and looks as the roofline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashbench.errors import UsageError, nearest
from flashbench.report import figure as page
from flashbench.report import points as rows
from flashbench.report import series
from flashbench.report.labels import Note, point_boxes, write_column, write_labels
from flashbench.report.looks import Look, marker_key, provider_looks
from flashbench.report.points import Point

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class View:
    """One quantity over the sequence length, and the band around it where it has one."""

    column: str
    title: str
    axis: str
    caption: str
    value: Callable[[Point], float | None]
    band: Callable[[Point], tuple[float | None, float | None]] = lambda _: (None, None)


VIEWS = {
    "time": View(
        "time_ms",
        "Time",
        "time of a call (ms)",
        "Median time of a call, measured; the band is its 95 % confidence interval.",
        lambda p: p.time_ms,
        lambda p: (p.time_low_ms, p.time_high_ms),
    ),
    "memory": View(
        "peak_net_bytes",
        "Peak memory",
        "peak memory, net of inputs",
        "Peak of the allocator during a call less what was live before it, measured in a pass of its own.",
        lambda p: p.peak_net_bytes,
    ),
    "traffic": View(
        "hbm_bytes",
        "HBM traffic",
        "HBM traffic of a call (GB, modelled)",
        "HBM bytes are modelled, not counted; the band reaches from compulsory traffic to no reuse.",
        lambda p: None if p.hbm_bytes is None else p.hbm_bytes / 1e9,
        lambda p: (
            None if p.hbm_bytes_low is None else p.hbm_bytes_low / 1e9,
            None if p.hbm_bytes_high is None else p.hbm_bytes_high / 1e9,
        ),
    ),
    "speedup": View(
        "speedup",
        "Speed-up",
        "speed-up",
        "Time of the reference divided by the provider's on the same problem; above 1 is faster.",
        lambda p: p.speedup,
    ),
}


def curves(frame: pd.DataFrame, view: str = "time", *, title: str = "") -> Figure:
    """One view of a metrics frame (one row per case) over the sequence length, as a figure that is not yet saved.

    Rows without the number are named in the footer, and by `notes`; where a provider ran out of memory the panel says so.
    Raises UsageError for an unknown view, or when no row can be drawn.
    """
    shown = _view(view)
    selection = rows.select(frame, (shown.column,))
    points = selection.points
    panel_rows, masks = series.panels(points)
    references = sorted({p.reference for p in points if p.reference})
    over = f" over {' and '.join(references)}" if view == "speedup" and references else ""
    markers = f"Markers: {marker_key({p.dtype for p in points})}."
    caption = selection.caption()
    footer = [f"{series.conditions_text(points)} {shown.caption} {markers}", *([caption] if caption else [])]
    looks = provider_looks(p.provider for p in points)
    with page.look_of_page():
        sheet = page.sheet(
            len(panel_rows),
            len(masks),
            {1: (6.6, 4.2), 2: (5.0, 3.4)}.get(len(masks), (4.3, 3.0)),
            title or f"{shown.title} of attention{over} on {' and '.join(selection.devices)}",
            footer,
            legend_entries=len(looks),
        )
        _set_axes(sheet.first, shown, points)
        for panel_row, line in zip(panel_rows, sheet.panels, strict=True):
            for mask, axes in zip(masks, line, strict=True):
                axes.set_title(series.panel_title(panel_row, mask), loc="left", pad=5)
                axes.grid(True, which="major", color="#e8e8e8", linewidth=0.7, zorder=0)
                if view == "speedup":
                    axes.axhline(1, color=page.INK, linewidth=1, zorder=2, gid="reference")
                here = [p for p in points if p.panel_row == panel_row and p.mask == mask]
                absent = [p for p, _ in selection.skipped if p.panel_row == panel_row and p.mask == mask]
                _draw(axes, shown, here, [p for p in absent if p.status == "oom"], looks)
        sheet.label_axes("sequence length", f"{shown.axis}{over}")
        page.provider_legend(sheet, looks)
    return sheet.figure


def notes(frame: pd.DataFrame, view: str = "time") -> list[str]:
    """The rows that `curves` does not draw, one line each with the reason."""
    return rows.select(frame, (_view(view).column,)).notes()


def _view(name: str) -> View:
    if name not in VIEWS:
        raise UsageError(f"unknown view '{name}'{nearest(name, VIEWS)} (known: {', '.join(VIEWS)})")
    return VIEWS[name]


def _set_axes(axes: Axes, view: View, points: Sequence[Point]) -> None:
    """Logarithmic axes: lengths in powers of two, each labelled; the panels share them."""
    lengths = sorted({p.seq_len for p in points})
    every = -(-len(lengths) // 10)
    axes.set_xscale("log", base=2)
    # Room on the right for the names of the lines.
    reach = max(lengths[-1] / lengths[0], 4.0)
    axes.set_xlim(lengths[0] / reach**0.06, lengths[-1] * reach**0.3)
    axes.set_xticks(lengths[::-1][::every], [page.length_text(n) for n in lengths[::-1][::every]])
    axes.set_xticks([], minor=True)

    values = [v for p in points for v in (view.value(p), *view.band(p)) if v is not None]
    if view.column == "speedup":
        values.append(1.0)
    low, high = min(values) / 1.5, max(values) * 1.9
    powers_of_two = view.column in ("peak_net_bytes", "speedup")
    axes.set_yscale("log", base=2 if powers_of_two else 10)
    axes.set_ylim(low, high)
    if not powers_of_two:
        page.plain_log_ticks(axes.yaxis, (low, high))
        return
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    ticks = [2.0**e for e in range(first, last + 1, 1 + (last - first) // 8)]
    text = size_text if view.column == "peak_net_bytes" else page.number_text
    axes.set_yticks(ticks, [f"{tick:g}" if text is page.number_text else text(tick) for tick in ticks])
    axes.set_yticks([], minor=True)


def size_text(size_bytes: float) -> str:
    """Bytes in the largest binary unit that keeps them at least 1: 64 MiB, 16 GiB."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >= 2**power:
            return f"{size_bytes / 2**power:.4g} {unit}"
    return f"{size_bytes:.4g} B"


def _draw(axes: Axes, view: View, points: Sequence[Point], oom: Sequence[Point], looks: dict[str, Look]) -> None:
    names: dict[str, Note] = {}
    spots: list[tuple[float, float]] = []
    drawn: set[tuple[float | None, ...]] = set()  # a band that several providers share is drawn once
    for line in series.lines(points):
        name, look = line[0].provider, looks[line[0].provider]
        x = [float(p.seq_len) for p in line]
        y = [view.value(p) or 0.0 for p in line]
        page.draw_line(axes, x, y, look, line[0].dtype, name)
        bands = [(a, *view.band(p)) for a, p in zip(x, line, strict=True)]
        whole = [(a, low, high) for a, low, high in bands if low is not None and high is not None]
        across, lows, highs = ([band[i] for band in whole] for i in range(3))
        if whole and (*lows, *highs) not in drawn:
            drawn.add((*lows, *highs))
            axes.fill_between(
                across, lows, highs, color=look.colour, alpha=0.15, linewidth=0, zorder=3, gid=f"band {name}"
            )
        spots += list(zip(x, y, strict=True))
        if name not in names or x[-1] > names[name].x:
            names[name] = Note(name, x[-1], y[-1], look.colour, (1, 0))
    boxes = write_column(axes, list(names.values()))
    top = axes.get_ylim()[1]
    first_oom: dict[str, Point] = {}
    for p in sorted(oom, key=lambda p: p.seq_len):
        first_oom.setdefault(p.provider, p)
    failures = [
        Note(
            f"{p.provider}: out of memory at {page.length_text(p.seq_len)}", p.seq_len, top, _colour(looks, p), (0, -1)
        )
        for p in first_oom.values()
    ]
    write_labels(axes, failures, point_boxes(axes, spots), boxes)


def _colour(looks: dict[str, Look], point: Point) -> str:
    return looks[point.provider].colour if point.provider in looks else page.INK
