"""Where labels go so that they cover neither each other nor the points: a small greedy placer, the same result every time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Text

LABEL_GID = "label"
"""Group id of the texts placed here, by which they are found in a figure (and in an SVG)."""

_MARGIN_PT = 1.0
_LEADER_PT = 11.0
"""A label whose near edge is further from its point than this gets a line to it."""
_NEAR_PT = 30.0
# Above and below first (a sweep runs sideways), then the sides, then the corners; in units of the unit circle.
_DIRECTIONS = ((0, 1), (0, -1), (-1, 0), (1, 0), (-1, 1), (1, 1), (-1, -1), (1, -1))
_RADII_PT = (5.0, 9.0, 14.0, 20.0, 27.0, 35.0, 44.0, 55.0, 70.0, 90.0)


@dataclass(frozen=True, slots=True)
class Box:
    """An upright rectangle in points (1/72 inch) from the lower left corner of the page."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.bottom < other.top and other.bottom < self.top
        )

    def inside(self, other: Box) -> bool:
        return (
            other.left <= self.left
            and self.right <= other.right
            and other.bottom <= self.bottom
            and self.top <= other.top
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """A label of `width` × `height` points that belongs to the point (x, y), in points on the page."""

    x: float
    y: float
    width: float
    height: float
    prefer: tuple[int, int] | None = None
    """The direction to try first at each distance, such as (1, 0) for the right."""


def place(
    wanted: Sequence[Wanted], bounds: Box, obstacles: Iterable[Box] = (), labels: Iterable[Box] = ()
) -> list[Box | None]:
    """A box for each label inside `bounds`: of the candidates near its point the one that covers the fewest obstacles, nearest first.

    No box overlaps one of `labels` or a label placed before it; None where that cannot be. Earlier labels choose first.
    """
    taken = list(labels)
    fixed = list(obstacles)
    placed: list[Box | None] = []
    for label in wanted:
        candidates = [box for box in _candidates(label) if box.inside(bounds)]
        clear = [box for box in candidates if not any(box.overlaps(other) for other in taken)]
        # Crossing a line reads better than standing far away.
        near = [box for box in clear if math.hypot(*_nearest(label, box)) <= _NEAR_PT] or clear
        around = _around(label)
        close = [other for other in (*fixed, *taken) if other.overlaps(around)]
        box = min(near, key=lambda b: _crossings(label, b, close), default=None)
        if box is not None:
            taken.append(box)
        placed.append(box)
    return placed


def _crossings(label: Wanted, box: Box, obstacles: Sequence[Box]) -> int:
    """How many obstacles the box and the way to it from the label's point cover."""
    x, y = _nearest(label, box)
    steps = int(math.hypot(x, y) / 4)
    way = [Box(label.x + x * t, label.y + y * t, label.x + x * t + 1, label.y + y * t + 1) for t in _between(steps)]
    return sum(box.overlaps(o) or any(spot.overlaps(o) for spot in way) for o in obstacles)


def _between(steps: int) -> list[float]:
    """Fractions along a leader, without the start, where the label's own marker is."""
    return [i / steps for i in range(2, steps)]


def _nearest(label: Wanted, box: Box) -> tuple[float, float]:
    """The way from the label's point to the nearest edge of the box, in points."""
    return min(max(label.x, box.left), box.right) - label.x, min(max(label.y, box.bottom), box.top) - label.y


def _around(label: Wanted) -> Box:
    """Everything that a candidate may touch."""
    x, y = _RADII_PT[-1] + label.width, _RADII_PT[-1] + label.height
    return Box(label.x - x, label.y - y, label.x + x, label.y + y)


def _candidates(label: Wanted) -> Iterable[Box]:
    """Boxes around the point, nearest first."""
    directions: tuple[tuple[int, int], ...] = _DIRECTIONS
    if label.prefer is not None:
        directions = (label.prefer, *(d for d in _DIRECTIONS if d != label.prefer))
    for radius in _RADII_PT:
        for dx, dy in directions:
            step = radius / math.hypot(dx, dy)
            # The side of the box that faces the point lies at the radius; on a centred axis the box is centred on it.
            x = label.x + dx * step + (dx - 1) / 2 * label.width
            y = label.y + dy * step + (dy - 1) / 2 * label.height
            yield Box(x, y, x + label.width, y + label.height)


@dataclass(frozen=True, slots=True)
class Note:
    """A text at a data point of an axes."""

    text: str
    x: float
    y: float
    colour: str
    prefer: tuple[int, int] | None = None
    size_pt: float = 8.0


def write_labels(
    axes: Axes, notes: Sequence[Note], obstacles: Sequence[Box] = (), labels: Sequence[Box] = ()
) -> list[Text]:
    """Draw the notes that find a place, with a thin line to the point where they had to move away; limits must be final."""
    canvas = axes.figure.canvas
    renderer = canvas.get_renderer()  # type: ignore[attr-defined]
    to_pt = 72 / axes.figure.dpi
    texts: list[Text] = []
    wanted: list[Wanted] = []
    for note in notes:
        text = _text(axes, note, "bottom")
        extent = text.get_window_extent(renderer)
        x, y = axes.transData.transform((note.x, note.y)) * to_pt
        size = (extent.width * to_pt + 2 * _MARGIN_PT, extent.height * to_pt + 2 * _MARGIN_PT)
        texts.append(text)
        wanted.append(Wanted(float(x), float(y), *size, prefer=note.prefer))

    frame = axes.get_window_extent(renderer)
    bounds = Box(frame.x0 * to_pt, frame.y0 * to_pt, frame.x1 * to_pt, frame.y1 * to_pt)
    drawn: list[Text] = []
    for note, text, want, box in zip(notes, texts, wanted, place(wanted, bounds, obstacles, labels), strict=True):
        if box is None:
            text.remove()
            continue
        _move(axes, text, note, box, want)
        drawn.append(text)
    return drawn


def _move(axes: Axes, text: Text, note: Note, box: Box, want: Wanted) -> None:
    """Put `text` into its box, and draw its leader when the box is not beside the point."""
    _shift(axes, text, box.left + _MARGIN_PT - want.x, box.bottom + _MARGIN_PT - want.y)
    if math.hypot(*_nearest(want, box)) > _LEADER_PT:
        _leader(axes, note, *_nearest(want, box))


def _shift(axes: Axes, text: Text, dx_pt: float, dy_pt: float) -> None:
    from matplotlib.transforms import ScaledTranslation

    figure = axes.figure
    text.set_transform(axes.transData + ScaledTranslation(dx_pt / 72, dy_pt / 72, figure.dpi_scale_trans))


def _leader(axes: Axes, note: Note, dx_pt: float, dy_pt: float) -> None:
    line = {"arrowstyle": "-", "color": note.colour, "linewidth": 0.6, "alpha": 0.7, "shrinkA": 0, "shrinkB": 3}
    axes.annotate("", xy=(note.x, note.y), xytext=(dx_pt, dy_pt), textcoords="offset points", arrowprops=line, zorder=2)


def write_column(axes: Axes, notes: Sequence[Note], gap_pt: float = 9.5) -> list[Box]:
    """Draw the notes in one column right of all their points, in the order of their heights; returns what they cover.

    For the names at the right ends of lines: a column keeps their order, which free placing does not.
    """
    if not notes:
        return []
    renderer = axes.figure.canvas.get_renderer()  # type: ignore[attr-defined]
    to_pt = 72 / axes.figure.dpi
    frame = axes.get_window_extent(renderer)
    spots = [tuple(float(v) * to_pt for v in axes.transData.transform((note.x, note.y))) for note in notes]
    left = max(x for x, _ in spots) + 10
    heights = stack([y for _, y in spots], gap_pt, frame.y0 * to_pt + gap_pt, frame.y1 * to_pt - gap_pt)
    boxes: list[Box] = []
    for note, (x, y), height in zip(notes, spots, heights, strict=True):
        text = _text(axes, note, "center_baseline")
        _shift(axes, text, left - x, height - y)
        _leader(axes, note, left - 1 - x, height - y)
        extent = text.get_window_extent(renderer)
        boxes.append(Box(*(float(v) * to_pt for v in extent.extents)))
    return boxes


def _text(axes: Axes, note: Note, vertical: Literal["bottom", "center_baseline"]) -> Text:
    from matplotlib.patheffects import withStroke

    text = axes.text(note.x, note.y, note.text, size=note.size_pt, color=note.colour, gid=LABEL_GID, zorder=6)
    text.set(horizontalalignment="left", verticalalignment=vertical)
    text.set_path_effects([withStroke(linewidth=2, foreground="white")])  # readable where it crosses a ceiling
    return text


def point_boxes(axes: Axes, points: Iterable[tuple[float, float]], half_pt: float = 3.5) -> list[Box]:
    """The squares that markers at data points cover."""
    to_pt = 72 / axes.figure.dpi
    boxes = []
    for point in points:
        x, y = (float(v) * to_pt for v in axes.transData.transform(point))
        boxes.append(Box(x - half_pt, y - half_pt, x + half_pt, y + half_pt))
    return boxes


def line_boxes(axes: Axes, groups: tuple[str, ...], step_pt: float = 5.0) -> list[Box]:
    """Small boxes along the lines of an axes whose group id starts with one of `groups`."""
    to_pt = 72 / axes.figure.dpi
    boxes = []
    for line in axes.lines:
        if not str(line.get_gid()).startswith(groups):
            continue
        corners = [(float(x) * to_pt, float(y) * to_pt) for x, y in axes.transData.transform(line.get_xydata())]
        for (x0, y0), (x1, y1) in itertools.pairwise(corners):
            count = int(math.hypot(x1 - x0, y1 - y0) / step_pt) + 1
            middles = [((i + 0.5) / count * (x1 - x0) + x0, (i + 0.5) / count * (y1 - y0) + y0) for i in range(count)]
            boxes += [Box(x - 1.5, y - 1.5, x + 1.5, y + 1.5) for x, y in middles]
    return boxes


def stack(heights: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Heights moved apart to at least `gap` and kept within `low` to `high`, in the same order, each as near as can be to where it was.

    Used for labels beside the ends of horizontal lines. When they do not all fit, the gap shrinks evenly.
    """
    if len(heights) > 1:
        gap = min(gap, (high - low) / (len(heights) - 1))
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    # Pool adjacent labels that collide, each pool centred on the mean of its members (isotonic regression with offsets).
    pools: list[list[float]] = []  # [sum of shifted wishes, members]
    for rank, index in enumerate(order):
        pools.append([heights[index] - rank * gap, 1.0])
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            total, count = pools.pop()
            pools[-1][0] += total
            pools[-1][1] += count
    shifted = [total / count for total, count in pools for _ in range(int(count))]
    ceiling = high - (len(heights) - 1) * gap
    result = [0.0] * len(heights)
    for rank, index in enumerate(order):
        result[index] = min(max(shifted[rank], low), ceiling) + rank * gap
    return result
