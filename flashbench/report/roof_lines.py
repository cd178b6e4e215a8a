"""Drawing of ceilings: bandwidths rising, peaks level, the exponential unit dotted, ridge points with a drop to the axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashbench.report.figure import GREY, INK
from flashbench.report.points import RowOfPanels
from flashbench.report.roofline_scale import Scale
from flashbench.report.roofs import SOURCES, Machine, Source, bandwidth, exp_roof, peaks, roof

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = {"spec": "-", "measured": (0, (5, 2.5))}
_EXP_STYLES = {"spec": (0, (1, 1)), "measured": (0, (1, 2.5))}


def draw_roofs(axes: Axes, scale: Scale, row: RowOfPanels) -> None:
    """Draw the ceilings of all machines, the reference ones first, and their ridges."""
    for machine in (*scale.others, scale.own):
        colour, width = (INK, 1.6) if machine is scale.own else (GREY, 1.0)
        for source in SOURCES:
            slope = bandwidth(machine, source, scale.regime)
            tops = peaks(machine, scale.dtypes, source, scale.regime)
            if slope is not None:
                end = max(tops) * 1e3 / slope.value if tops else scale.x_limits[1]
                ys = [scale.y(x * slope.value / 1e3) for x in (scale.x_limits[0], end)]
                gid = f"bandwidth {machine.label} {source}"
                axes.plot(
                    [scale.x_limits[0], end],
                    ys,
                    color=colour,
                    linestyle=_STYLES[source],
                    linewidth=width,
                    zorder=2,
                    gid=gid,
                )
            for top, dtypes in tops.items():
                gid = f"peak {machine.label} {source} {' '.join(dtypes)}"
                _horizontal(axes, scale, machine, source, top, _STYLES[source], width, colour, gid)
        _drawridges(axes, scale, machine, colour)
    if scale.with_l2:
        _draw_l2(axes, scale)
    for source in SOURCES:
        value = exp_roof(scale.own, row, source, scale.regime)
        if value is not None and scale.y(value) < scale.y_limits[1]:
            _horizontal(axes, scale, scale.own, source, value, _EXP_STYLES[source], 2.4, INK, f"exp {source}")


def _draw_l2(axes: Axes, scale: Scale) -> None:
    """The L2's bandwidth of the own device, up to its highest peak."""
    for source in SOURCES:
        slope = bandwidth(scale.own, source, scale.regime, "l2")
        if slope is None:
            continue
        tops = [top for s in SOURCES for top in peaks(scale.own, scale.dtypes, s, scale.regime)]
        end = max(tops) * 1e3 / slope.value if tops else scale.x_limits[1]
        xs = [scale.x_limits[0], end]
        ys = [scale.y(x * slope.value / 1e3) for x in xs]
        gid = f"l2 bandwidth {scale.own.label} {source}"
        axes.plot(xs, ys, color=INK, linestyle=_STYLES[source], linewidth=0.9, zorder=2, gid=gid)


def _horizontal(
    axes: Axes,
    scale: Scale,
    machine: Machine,
    source: Source,
    tflops: float,
    style: object,
    width: float,
    colour: str,
    gid: str,
) -> None:
    """A compute ceiling from where the machine's bandwidth meets it to the right edge."""
    slope = bandwidth(machine, source, scale.regime) or bandwidth(machine, "spec") or bandwidth(machine, "measured")
    start = tflops * 1e3 / slope.value if slope else scale.x_limits[0]
    xs, y = [start, scale.x_limits[1]], scale.y(tflops)
    axes.plot(xs, [y, y], color=colour, linestyle=style, linewidth=width, zorder=2, gid=gid)


def ridges(scale: Scale, machine: Machine) -> dict[float, float]:
    """Intensity of each ridge point and its height in TFLOP/s: of the data sheet, or of the measurement where there is none."""
    found: dict[float, float] = {}
    for dtype in scale.dtypes:
        limits = [roof(machine, dtype, source, scale.regime) for source in SOURCES]
        limit = next((r for r in limits if r.ridge is not None), None)
        if limit is not None and limit.ridge is not None and limit.peak_tflops is not None:
            found[limit.ridge] = limit.peak_tflops
    return found


def _drawridges(axes: Axes, scale: Scale, machine: Machine, colour: str) -> None:
    """A dot at each ridge point, dropped to the axis."""
    for intensity, top in ridges(scale, machine).items():
        y = scale.y(top)
        axes.plot([intensity] * 2, [scale.y_limits[0], y], color=colour, linestyle=":", linewidth=0.8, zorder=1)
        axes.plot([intensity], [y], marker="o", markersize=4, color=colour, zorder=3, gid=f"ridge {machine.label}")
