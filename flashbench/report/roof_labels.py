"""Labels of ceilings: bandwidths along their slopes, ridge numbers upright, peaks beside the right end of a row of panels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashbench.report.figure import GREY, INK, SMALL_PT, number_text
from flashbench.report.labels import Box, stack
from flashbench.report.points import RowOfPanels
from flashbench.report.roof_lines import ridges
from flashbench.report.roofline_scale import Scale
from flashbench.report.roofs import SOURCES, Machine, Source, bandwidth, exp_roof, peaks, without_peak

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def write_ridge_numbers(axes: Axes, scale: Scale, blocked: Sequence[Box]) -> list[Box]:
    """The number of each ridge upright beside its line, as low as it is clear of `blocked`; returns what the numbers cover."""
    renderer = axes.figure.canvas.get_renderer()  # type: ignore[attr-defined]
    to_pt = 72 / axes.figure.dpi
    covered: list[Box] = []
    for machine in (scale.own, *scale.others):
        colour = INK if machine is scale.own else GREY
        for intensity, top in ridges(scale, machine).items():
            text = axes.annotate(
                f"ridge {number_text(intensity)}",
                (intensity, scale.y_limits[0]),
                (-1.5, 3),
                textcoords="offset points",
                rotation=90,
                ha="right",
                va="bottom",
                size=SMALL_PT - 1,
                color=colour,
                gid="ridge number",
            )
            low = Box(*(float(v) * to_pt for v in text.get_window_extent(renderer).extents))
            room = scale.inches(intensity, scale.y(top))[1] * 72 - (low.top - low.bottom)
            lifts = [4.0 * i for i in range(max(1, int(room / 4)))]
            boxes = [Box(low.left, low.bottom + lift, low.right, low.top + lift) for lift in lifts]
            taken = [*blocked, *covered]
            best = min(range(len(lifts)), key=lambda i: sum(boxes[i].overlaps(other) for other in taken))
            text.set_position((-1.5, 3 + lifts[best]))
            covered.append(boxes[best])
    return covered


_STEP_PT = 6.0


@dataclass(frozen=True, slots=True)
class _Slope:
    gbps: float
    end: float
    """Intensity at which the line ends, in FLOP/byte."""
    texts: tuple[str, ...]
    """The label, and shorter ones for a line on which it has no room."""
    colour: str
    lift_pt: float
    """How far above the line the text stands; 0 for a text that interrupts it."""


def _slopes(scale: Scale) -> list[_Slope]:
    """The bandwidth lines to label, the device's own first; two of its lines that nearly touch share one label."""

    def line(machine: Machine, source: Source, text: str, lift_pt: float) -> _Slope:
        ceiling = bandwidth(machine, source, scale.regime)
        assert ceiling is not None
        tops = peaks(machine, scale.dtypes, source, scale.regime)
        end = max(tops) * 1e3 / ceiling.value if tops else scale.x_limits[1]
        shorter = (f"{machine.label} {text}", text, f"{_gbps(ceiling.value)} GB/s")
        return _Slope(ceiling.value, end, shorter, INK if machine is scale.own else GREY, lift_pt)

    own = {s: c.value for s in SOURCES if (c := bandwidth(scale.own, s, scale.regime)) is not None}
    texts = {source: f"{_gbps(value)} GB/s {source}" for source, value in own.items()}
    apart_decades = math.log10(max(own.values()) / min(own.values())) if own else 0.0
    if len(own) == 2 and apart_decades * scale.inches_per_decade * 72 * math.sqrt(0.5) < 2.2 * SMALL_PT:
        upper = max(SOURCES, key=lambda source: own[source])
        found = [line(scale.own, upper, f"{texts['spec']}, {_gbps(own['measured'])} measured", 2.5)]
    else:
        found = [line(scale.own, source, text, 2.5) for source, text in texts.items()]
    if scale.with_l2:
        source = next((s for s in SOURCES[::-1] if bandwidth(scale.own, s, scale.regime, "l2")), None)
        l2 = bandwidth(scale.own, source, scale.regime, "l2") if source else None
        if l2 is not None:
            tops = [top for s in SOURCES for top in peaks(scale.own, scale.dtypes, s, scale.regime)]
            end = max(tops) * 1e3 / l2.value if tops else scale.x_limits[1]
            found.append(_Slope(l2.value, end, (f"L2 {_gbps(l2.value)} GB/s {source}", "L2"), INK, 2.5))
    for machine in scale.others:
        source = next((s for s in SOURCES if bandwidth(machine, s, scale.regime)), None)
        if source is not None:
            ceiling = bandwidth(machine, source, scale.regime)
            found.append(line(machine, source, f"{_gbps(ceiling.value) if ceiling else 0} GB/s", 0))
    return found


def write_slope_labels(axes: Axes, scale: Scale, points: Sequence[Box]) -> list[Box]:
    """Write each bandwidth along its line, as low as it finds a stretch free of `points` and of other labels; returns what is covered."""
    from matplotlib.transforms import ScaledTranslation

    renderer = axes.figure.canvas.get_renderer()  # type: ignore[attr-defined]
    to_pt = 72 / axes.figure.dpi
    half_diagonal = math.sqrt(0.5)
    covered: list[Box] = []
    for slope in _slopes(scale):
        text = axes.text(0, 0, "", size=SMALL_PT - 0.5, color=slope.colour, gid="bandwidth label", zorder=2.5)
        start_x = max(scale.x_limits[0], scale.y_limits[0] / scale.factor * 1e3 / slope.gbps)
        per_pt = 10 ** (half_diagonal / 72 / scale.inches_per_decade)
        room = scale.diagonal_pt(start_x, slope.end)
        for words in slope.texts:
            text.set_text(words)
            length = text.get_window_extent(renderer).width * to_pt
            if length + 14 <= room:
                break
        else:
            text.remove()
            continue
        offsets = [14.0 + 6 * i for i in range(max(1, int((room - length - 14) / 6)))]
        places = [(x := start_x * per_pt**offset, scale.y(x * slope.gbps / 1e3)) for offset in offsets]
        boxes = [_along(axes, x, y, length, slope.lift_pt) for x, y in places]
        clear = [i for i, along in enumerate(boxes) if not _touch(along, covered)]
        if not clear:
            text.remove()
            continue
        best = min(clear, key=lambda i: sum(_touch([box], points) for box in boxes[i]))
        text.set(
            rotation=45, rotation_mode="anchor", verticalalignment="bottom" if slope.lift_pt else "center_baseline"
        )
        text.set_position(places[best])
        if slope.lift_pt:
            up = slope.lift_pt * half_diagonal / 72
            text.set_transform(axes.transData + ScaledTranslation(-up, up, axes.figure.dpi_scale_trans))
        else:
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8})
        covered += boxes[best]
    return covered


def _touch(some: Sequence[Box], others: Sequence[Box]) -> bool:
    return any(a.overlaps(b) for a in some for b in others)


def _along(axes: Axes, x: float, y: float, length_pt: float, lift_pt: float) -> list[Box]:
    """Small boxes along a text that starts at (x, y), or `lift_pt` off it to the upper left, and rises at 45 degrees."""
    to_pt = 72 / axes.figure.dpi
    left, bottom = (float(v) * to_pt for v in axes.transData.transform((x, y)))
    half = SMALL_PT * 0.45
    off = (lift_pt + half if lift_pt else 0) * math.sqrt(0.5)
    steps = [i * 6 * math.sqrt(0.5) for i in range(int(length_pt / 6) + 2)]
    return [
        Box(left - off + d - half, bottom + off + d - half, left - off + d + half, bottom + off + d + half)
        for d in steps
    ]


def above_roof(axes: Axes, scale: Scale) -> list[Box]:
    """The room above the device's bandwidth line, in narrow boxes: a label there would seem to belong to a point above the roof."""
    slopes = [c.value for s in SOURCES if (c := bandwidth(scale.own, s, scale.regime)) is not None]
    if not slopes:
        return []
    to_pt = 72 / axes.figure.dpi
    frame = axes.get_window_extent()
    # In points on the page the line rises at 45 degrees through its height at 1 FLOP/byte.
    x, y = (float(v) * to_pt for v in axes.transData.transform((1, scale.y(max(slopes) / 1e3))))
    left, right, top = frame.x0 * to_pt, frame.x1 * to_pt, frame.y1 * to_pt
    steps = [left + i * _STEP_PT for i in range(int((right - left) / _STEP_PT))]
    return [Box(at, y - x + at + _STEP_PT, at + _STEP_PT, top) for at in steps if y - x + at + _STEP_PT < top]


@dataclass(frozen=True, slots=True)
class _SideLabel:
    """Two lines of text beside a horizontal ceiling: what it is, and whose."""

    tflops: float
    head: str
    tail: str
    colour: str


_SIDE_PT = 12.0
"""Between the panels and the side labels."""
_LEAST_SIDE_INCHES = 1.9


def side_inches(scale: Scale, panel_rows: Sequence[RowOfPanels]) -> float:
    """Room that the side labels take beside the last column."""
    from matplotlib.textpath import TextPath

    texts = [(text, SMALL_PT - 1) for text in _missing_peaks(scale)]
    for label in (label for row in panel_rows for label in _side_labels(scale, row)):
        texts += [(label.head, SMALL_PT), (label.tail, SMALL_PT - 1)]
    widths_pt = [TextPath((0, 0), text, size=size).get_extents().x1 for text, size in texts]
    return max(_LEAST_SIDE_INCHES, (_SIDE_PT + max(widths_pt, default=0.0) + 8) / 72)


def _side_labels(scale: Scale, row: RowOfPanels) -> list[_SideLabel]:
    found: list[_SideLabel] = []
    for machine in scale.others:
        for top in {v: None for s in SOURCES for v in peaks(machine, scale.dtypes, s, scale.regime)}:
            found.append(_SideLabel(top, f"{_value(scale, top)}  {machine.label}", _whose(machine), GREY))
    for source in SOURCES:
        for top, dtypes in peaks(scale.own, scale.dtypes, source, scale.regime).items():
            found.append(_SideLabel(top, f"{_value(scale, top)}  {', '.join(dtypes)} {source}", scale.own.label, INK))
        value = exp_roof(scale.own, row, source, scale.regime)
        if value is not None:
            mode, d, d_v = row
            dim = f"head dim {d if d == d_v else f'{d}/{d_v}'}"
            arrow = "↑ " if scale.y(value) >= scale.y_limits[1] else ""
            tail = dim if mode == "forward" else f"{dim}, {mode.replace('_', ' + ')}"
            found.append(_SideLabel(value, f"{arrow}{_value(scale, value)}  exp unit {source}", tail, INK))
    return found


def _missing_peaks(scale: Scale) -> list[str]:
    return [f"no {dtype} peak on {scale.own.label}" for dtype in without_peak(scale.own, scale.dtypes)]


def write_side_labels(axes: Axes, scale: Scale, row: RowOfPanels) -> None:
    """Value and origin of each horizontal ceiling, beside the right end of a row of panels, in the room of `side_inches`."""
    labels = _side_labels(scale, row)
    width_pt, height_pt = (v * 72 for v in scale.panel_inches)
    ends = [min(scale.inches(1, scale.y(label.tflops))[1] * 72, height_pt) for label in labels]
    heights = stack(ends, 2.45 * SMALL_PT, 10, height_pt + 6)
    x = 1 + _SIDE_PT / width_pt
    for label, end, height in zip(labels, ends, heights, strict=True):
        y = height / height_pt
        if scale.y(label.tflops) < scale.y_limits[1]:
            leader = ([1, 1 + 9 / width_pt], [end / height_pt, y])
            axes.plot(*leader, transform=axes.transAxes, clip_on=False, color=label.colour, linewidth=0.6, gid="leader")
        axes.text(
            x, y, label.head, transform=axes.transAxes, size=SMALL_PT, color=label.colour, va="baseline", gid="ceiling label"
        )  # fmt: skip
        axes.text(
            x, y - 3 / height_pt, label.tail, transform=axes.transAxes, size=SMALL_PT - 1, color=GREY, va="top", gid="ceiling label"
        )  # fmt: skip
    for index, text in enumerate(_missing_peaks(scale)):
        y = (min(heights, default=height_pt) - (index + 2) * 2 * SMALL_PT) / height_pt
        axes.text(x, y, text, transform=axes.transAxes, size=SMALL_PT - 1, color=INK, gid="no peak")


def _whose(machine: Machine) -> str:
    return "device of the @ lines" if machine.own else "not this device"


def _value(scale: Scale, tflops: float) -> str:
    return number_text(scale.y(tflops))


def _gbps(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else number_text(value)
