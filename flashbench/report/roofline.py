"""The roofline: useful FLOP/s over arithmetic intensity, under the ceilings of the device and beside those of others.

Conventions: log-log with square decades; spec ceilings solid, measured ones dashed; one colour per provider, one marker per dtype; one
line per sweep of the sequence length. One row of panels per mode and head dimension, one column per mask, all on the same axes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from flashbench.errors import UsageError, nearest
from flashbench.report import figure as page
from flashbench.report import points as rows
from flashbench.report import series
from flashbench.report.labels import Note, line_boxes, point_boxes, write_column, write_labels
from flashbench.report.looks import Look, provider_looks
from flashbench.report.points import Point
from flashbench.report.roof_labels import (
    above_roof,
    side_inches,
    write_ridge_numbers,
    write_side_labels,
    write_slope_labels,
)
from flashbench.report.roof_lines import draw_roofs
from flashbench.report.roofline_scale import Scale, scale_for
from flashbench.report.roofline_text import footer
from flashbench.report.roofs import SOURCES, Machine, bandwidth, excess, machines_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LEVELS = ("hbm", "l2")


def roofline(
    frame: pd.DataFrame, machines: Sequence[Machine], *, title: str = "", levels: Sequence[str] = ("hbm",)
) -> Figure:
    """The roofline of a metrics frame (one row per case) as a figure that is not yet saved.

    With the level `l2` each point stands a second time, at the same height, over the bytes that it takes from the L2, and the L2's
    bandwidth is drawn (hierarchical roofline; Yang, Kurth, Williams 2020). Rows that cannot be drawn are named in the footer, and by
    `notes`. Raises UsageError when no row can be drawn, or when a device of the rows, or a level, has no ceiling.
    """
    selection = rows.select(frame, rows.ON_A_ROOFLINE)
    points = selection.points
    homes = machines_of(machines, selection.devices)
    own = homes[points[0].device_id]
    _check_levels(levels, own)
    panel_rows, masks = series.panels(points)
    scale = scale_for(points, machines, own, len(masks), "l2" in levels)
    with page.look_of_page():
        looks = provider_looks(p.provider for p in points)
        sheet = page.sheet(
            len(panel_rows),
            len(masks),
            scale.panel_inches,
            title or f"Roofline of attention on {' and '.join(selection.devices)}",
            footer(selection, scale),
            legend_entries=len(looks),
            right_inches=side_inches(scale, panel_rows),
        )
        for panel_row, line in zip(panel_rows, sheet.panels, strict=True):
            for mask, axes in zip(masks, line, strict=True):
                here = [p for p in points if p.panel_row == panel_row and p.mask == mask]
                _set_axes(axes, scale)
                axes.set_title(series.panel_title(panel_row, mask), loc="left", pad=5)
                draw_roofs(axes, scale, panel_row)
                _draw_points(axes, here, homes, looks, scale)
                _write_labels(axes, here, looks, scale)
            write_side_labels(line[-1], scale, panel_row)
        sheet.label_axes("arithmetic intensity  (useful FLOP per HBM byte, modelled)", f"useful {scale.unit}")
        page.provider_legend(sheet, looks)
    return sheet.figure


def _set_axes(axes: Axes, scale: Scale) -> None:
    axes.set(xscale="log", yscale="log", xlim=scale.x_limits, ylim=scale.y_limits)
    page.plain_log_ticks(axes.xaxis, scale.x_limits)
    page.plain_log_ticks(axes.yaxis, scale.y_limits)
    axes.grid(True, which="major", color="#e8e8e8", linewidth=0.7, zorder=0)
    axes.set_axisbelow(True)


def _check_levels(levels: Sequence[str], own: Machine) -> None:
    for level in levels:
        if level not in LEVELS:
            raise UsageError(f"unknown level '{level}'{nearest(level, LEVELS)} (known: {', '.join(LEVELS)})")
    if "hbm" not in levels:
        raise UsageError("a roofline has the level hbm; give hbm,l2 for both")
    if "l2" in levels and not any(bandwidth(own, source, level="l2") for source in SOURCES):
        raise UsageError(f"no L2 bandwidth of {own.label} is known; run `flashbench ceilings` there")


def _draw_points(
    axes: Axes, points: Sequence[Point], homes: Mapping[str, Machine], looks: dict[str, Look], scale: Scale
) -> None:
    """One line per sweep, its markers, and each point's interval of intensity."""
    for line in series.lines(points):
        name, look = line[0].provider, looks[line[0].provider]
        x = [p.intensity or 0.0 for p in line]
        y = [scale.y(p.tflops) for p in line]
        hollow = [p.cache_resident or excess(p, homes[p.device_id]) is not None for p in line]
        page.draw_line(axes, x, y, look, line[0].dtype, name, hollow)
        if scale.with_l2:
            in_l2 = [
                (p.intensity_low, height) for p, height in zip(line, y, strict=True) if p.intensity_low is not None
            ]
            axes.plot(
                [x for x, _ in in_l2],
                [height for _, height in in_l2],
                linestyle="none",
                marker="x",
                markersize=4,
                color=look.colour,
                zorder=5,
                gid=f"l2 points {name}",
            )
        for p, height in zip(line, y, strict=True):
            if p.intensity_low is not None and p.intensity_high is not None and p.intensity_high > p.intensity_low:
                ends = [p.intensity_low, p.intensity_high]
                axes.plot(
                    ends,
                    [height, height],
                    color=look.colour,
                    linewidth=0.7,
                    alpha=0.3,
                    zorder=3,
                    gid=f"interval {name}",
                )


def _write_labels(axes: Axes, points: Sequence[Point], looks: dict[str, Look], scale: Scale) -> None:
    """Bandwidths along their slopes, the providers at the right ends of their lines, and the first and last lengths."""
    spots = [(p.intensity or 0, scale.y(p.tflops)) for p in points]
    if scale.with_l2:
        spots += [(p.intensity_low, scale.y(p.tflops)) for p in points if p.intensity_low is not None]
    markers = point_boxes(axes, spots)
    labels = write_slope_labels(axes, scale, markers)
    labels += write_ridge_numbers(axes, scale, [*markers, *labels])
    ends: dict[str, Point] = {}
    for line in series.lines(points):
        best = ends.get(line[-1].provider)
        if best is None or (line[-1].tflops or 0) > (best.tflops or 0):
            ends[line[-1].provider] = line[-1]
    names = [Note(name, p.intensity or 0, scale.y(p.tflops), looks[name].colour, (1, 0)) for name, p in ends.items()]
    rightmost = max((note.x for note in names), default=0)
    labels += write_column(axes, [note for note in names if note.x > rightmost / 3])
    inner = [note for note in names if note.x <= rightmost / 3]
    obstacles = markers + line_boxes(axes, ("line", "peak", "bandwidth")) + above_roof(axes, scale)
    write_labels(axes, [*inner, *_end_notes(points, scale)], obstacles, labels)


def _end_notes(points: Sequence[Point], scale: Scale) -> list[Note]:
    """The first and the last length of every line; ends of one length that stand in one column share a label."""
    ends: list[tuple[str, float, float]] = []
    for line in series.lines(points):
        last = line[-1]
        ends.append((f"N = {page.length_text(line[0].seq_len)}", line[0].intensity or 0.0, scale.y(line[0].tflops)))
        if len(line) > 1:
            ends.append((page.length_text(last.seq_len), last.intensity or 0.0, scale.y(last.tflops)))
    near = 0.16 / scale.inches_per_decade  # decades: about two marker widths
    columns: list[list[tuple[str, float, float]]] = []
    for end in sorted(ends, key=lambda e: (e[0], e[1], e[2])):
        text, x, y = end
        for column in columns:
            same_place = any(abs(math.log10(x / c[1])) < near and abs(math.log10(y / c[2])) < 5 * near for c in column)
            if column[0][0] == text and same_place:
                column.append(end)
                break
        else:
            columns.append([end])
    lowest = [min(column, key=lambda e: e[2]) for column in columns]
    return [Note(text, x, y, "#444444", prefer=(0, -1)) for text, x, y in sorted(lowest, key=lambda e: (e[1], e[2]))]
