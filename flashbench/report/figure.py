"""What every picture shares: a canvas without a display, panels laid out in inches, numbers on axes, saving.

Pictures are built on `matplotlib.figure.Figure` with the Agg canvas and never through pyplot, so that no window system is asked for
and no figure is kept alive by a global list.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashbench.errors import UsageError, nearest
from flashbench.report.looks import DTYPE_MARKERS, Look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
DPI = 150
FONT_PT = 9.0
SMALL_PT = 8.0
INK = "#222222"
GREY = "#8a8a8a"


def length_text(length: float) -> str:
    """A sequence length as people write it: 512, 1k, 16k (k = 1,024); lengths that are no round multiple stay as they are."""
    whole = int(length)
    return f"{whole // 1024}k" if whole >= 1024 and whole % 1024 == 0 else str(whole)


def number_text(value: float) -> str:
    """Three significant digits without an exponent: 0.0473, 4.8, 295, 1,979."""
    if value >= 100 or value == 0:
        return f"{value:,.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"


def plain_log_ticks(axis: Axis, limits: tuple[float, float]) -> None:
    """Powers of ten as plain numbers (0.1, 10, 1,000), and 2 and 5 times them where there would be fewer than two."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    low, high = (math.log10(limit) for limit in limits)
    few = math.floor(high) - math.ceil(low) < 1

    def between(value: float, _: object) -> str:
        digit = round(value / 10 ** math.floor(math.log10(value) + 1e-9), 6)
        return f"{value:,.10g}" if digit in (2, 5) else ""

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(FuncFormatter(between) if few else NullFormatter())


def look_of_page() -> AbstractContextManager[None]:
    """Settings under which a figure is built and saved, whatever a user's matplotlibrc says."""
    import matplotlib as mpl

    # The backend is not touched: asking for another one would outlast the context.
    defaults = {name: value for name, value in mpl.rcParamsDefault.items() if not name.startswith("backend")}
    settings: Any = defaults | {
        "font.family": "DejaVu Sans",
        "font.size": FONT_PT,
        "axes.labelsize": FONT_PT + 1,
        "axes.titlesize": FONT_PT + 1,
        "xtick.labelsize": FONT_PT,
        "ytick.labelsize": FONT_PT,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "text.color": INK,
        "text.usetex": False,
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "pdf.fonttype": 42,
        "svg.hashsalt": "flashbench",
    }
    return mpl.rc_context(settings)


@dataclass(frozen=True, slots=True)
class Sheet:
    """A page with a grid of panels that share both axes, laid out in inches."""

    figure: Figure
    panels: tuple[tuple[Axes, ...], ...]
    """Rows of axes, top row first."""

    @property
    def first(self) -> Axes:
        return self.panels[0][0]

    def label_axes(self, x: str, y: str) -> None:
        """Axis labels at the outer panels only: the axes are shared."""
        for axes in self.panels[-1]:
            axes.set_xlabel(x)
        for row in self.panels:
            row[0].set_ylabel(y)


def sheet(
    rows: int,
    columns: int,
    panel_inches: tuple[float, float],
    title: str,
    footer: Sequence[str],
    legend_entries: int,
    right_inches: float = 0.2,
) -> Sheet:
    """A page of `rows` × `columns` panels of exactly `panel_inches`, a title and a legend above and footer paragraphs, wrapped, below.

    `right_inches` is what is kept free beside the last column for labels of horizontal lines.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width, height = panel_inches
    left, gap_x, gap_y = 0.95, 0.3, 0.42
    page_width = left + columns * width + (columns - 1) * gap_x + right_inches
    # 0.066 inch: the mean advance of DejaVu Sans at 8 points, a little rounded up.
    lines = [line for text in footer for line in textwrap.wrap(text, int((page_width - 0.3) / 0.066))]
    line_height = SMALL_PT * 1.35 / 72
    bottom = 0.6 + len(lines) * line_height + 0.15
    top = 0.68 + 0.17 * -(-legend_entries // legend_columns(page_width, legend_entries))
    page_height = bottom + rows * height + (rows - 1) * gap_y + top

    figure = Figure(figsize=(page_width, page_height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    grid: list[tuple[Axes, ...]] = []
    first: Axes | None = None
    for row in range(rows):
        line: list[Axes] = []
        for column in range(columns):
            x = left + column * (width + gap_x)
            y = bottom + (rows - 1 - row) * (height + gap_y)
            rect = (x / page_width, y / page_height, width / page_width, height / page_height)
            axes = figure.add_axes(rect, sharex=first, sharey=first)
            axes.tick_params(labelbottom=row == rows - 1, labelleft=column == 0)
            first = first or axes
            line.append(axes)
        grid.append(tuple(line))
    figure.text(left / page_width, 1 - 0.14 / page_height, title, size=FONT_PT + 3, weight="bold", va="top")
    for index, text in enumerate(lines):
        y = 0.15 + (len(lines) - 1 - index) * line_height
        figure.text(0.15 / page_width, y / page_height, text, size=SMALL_PT, color="#444444", va="bottom", gid="footer")
    return Sheet(figure, tuple(grid))


def legend_columns(page_inches: float, entries: int) -> int:
    """Entries side by side in a legend as wide as the page."""
    return min(entries, max(2, int(page_inches / 1.7)))


def provider_legend(page: Sheet, looks: dict[str, Look]) -> None:
    """One entry per provider, under the title; markers stand for dtypes and are explained in the footer."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=look.colour, linestyle=look.dashes, linewidth=2, marker="o", markersize=5, label=name)
        for name, look in looks.items()
    ]
    box = page.first.get_position()
    height = page.figure.get_figheight()
    page.figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(box.x0, 1 - 0.36 / height),
        ncols=legend_columns(page.figure.get_figwidth(), len(handles)),
        frameon=False,
        borderaxespad=0,
        borderpad=0,
        handlelength=3.2,
        columnspacing=1.6,
    )


def draw_line(
    axes: Axes, x: Sequence[float], y: Sequence[float], look: Look, dtype: str, name: str, hollow: Sequence[bool] = ()
) -> None:
    """One provider's line with the dtype's marker at each point; a hollow marker where `hollow` says so."""
    axes.plot(x, y, color=look.colour, linestyle=look.dashes, linewidth=1.3, zorder=4, gid=f"line {name}")
    marks = hollow or [False] * len(x)
    for empty in (False, True):
        chosen = [i for i, mark in enumerate(marks) if mark == empty]
        if chosen:
            axes.plot(
                [x[i] for i in chosen],
                [y[i] for i in chosen],
                linestyle="none",
                marker=DTYPE_MARKERS[dtype],
                markersize=5.2,
                markerfacecolor="white" if empty else look.colour,
                markeredgecolor=look.colour if empty else "white",
                markeredgewidth=1.2 if empty else 0.5,
                zorder=5,
                gid=f"{'hollow ' if empty else ''}points {name}",
            )


def picture_path(path: Path | str) -> Path:
    """The path of a picture to be written. UsageError for an ending that is no format, or a folder that is not there."""
    target = Path(path)
    ending = target.suffix.lower().removeprefix(".")
    if ending not in FORMATS:
        known = ", ".join(f".{name}" for name in FORMATS)
        raise UsageError(
            f"'{target}' does not end in a picture format{nearest(ending, FORMATS)} (known: {known}); name the file with one of them"
        )
    if not target.parent.is_dir():
        raise UsageError(
            f"cannot write '{target}': the folder '{target.parent}' does not exist; create it or name another"
        )
    return target


def save(figure: Figure, path: Path | str) -> None:
    """Write `figure` as PNG, SVG or PDF, by the ending of `path`.

    Raises UsageError for another ending, a folder that is not there, or a file that cannot be written.
    """
    target = picture_path(path)
    ending = target.suffix.lower().removeprefix(".")
    # No date in the file: the same rows give the same bytes.
    metadata = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[ending]
    try:
        with look_of_page():
            figure.savefig(target, format=ending, metadata=metadata)
    except OSError as error:
        raise UsageError(
            f"cannot write '{target}': {error.strerror or error}; name a file that can be written"
        ) from error
