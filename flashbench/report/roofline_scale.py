"""The axes that all panels of a roofline share: limits, unit, and a size of page that keeps decades square."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flashbench.records import DTYPES
from flashbench.report.points import Point
from flashbench.report.roofs import SOURCES, Machine, bandwidth, exp_roof, peaks, roof

_TOO_FAR = 20.0
"""A reference whose bandwidth is more than this many times the device's own would only squeeze the picture."""
_EXP_ROOM = 2.2
"""The exponential ceiling is drawn up to this multiple of the highest peak; above that it holds nothing back."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Axes shared by all panels; the y axis counts in `unit`, `factor` of them to one TFLOP/s."""

    own: Machine
    others: tuple[Machine, ...]
    left_out: tuple[Machine, ...]
    dtypes: tuple[str, ...]
    regime: str
    x_limits: tuple[float, float]
    y_limits: tuple[float, float]
    inches_per_decade: float
    unit: str
    factor: float
    with_l2: bool = False
    """Whether the L2's bandwidth and intensities are drawn as well."""

    def y(self, tflops: float | None) -> float:
        return (tflops or 0.0) * self.factor

    @property
    def panel_inches(self) -> tuple[float, float]:
        """Width and height of a panel in which a decade is as wide as it is high."""
        x, y = (math.log10(high / low) for low, high in (self.x_limits, self.y_limits))
        return x * self.inches_per_decade, y * self.inches_per_decade

    def diagonal_pt(self, start_x: float, end_x: float) -> float:
        """Length in points of a bandwidth line between two intensities."""
        return math.log10(end_x / start_x) * self.inches_per_decade * 72 * math.sqrt(2)

    def inches(self, x: float, y: float) -> tuple[float, float]:
        """Position of (x, y) in inches from the panel's lower left corner."""
        across = math.log10(x / self.x_limits[0]) * self.inches_per_decade
        return across, math.log10(y / self.y_limits[0]) * self.inches_per_decade


def scale_for(
    points: Sequence[Point], machines: Sequence[Machine], own: Machine, columns: int, with_l2: bool = False
) -> Scale:
    """Limits that show every point and every roof near them, and a size of page that keeps decades square."""
    dtypes = tuple(dtype for dtype in DTYPES if dtype in {p.dtype for p in points})
    regimes = {p.regime for p in points}
    regime = regimes.pop() if len(regimes) == 1 else ""
    own_gbps = _bandwidth(own)
    others = [m for m in machines if m is not own and m.label != own.label]
    left_out = tuple(m for m in others if own_gbps and _bandwidth(m) > _TOO_FAR * own_gbps)
    shown = tuple(m for m in others if m not in left_out)

    own_tops = [value for s in SOURCES for value in peaks(own, dtypes, s, regime)]
    tops = [value for m in shown for s in SOURCES for value in peaks(m, dtypes, s, regime)] + own_tops
    values = [p.tflops or 0.0 for p in points]
    small = max(values + own_tops) < 1
    top = max(values + tops)
    exps = [exp_roof(own, p.panel_row, s, regime) for p in points for s in SOURCES]
    top = max([top, *(e for e in exps if e is not None and e < _EXP_ROOM * top)])
    low, high = min(values) / 2.2, top * 1.35

    ridges = [r.ridge for m in (own, *shown) for d in dtypes for s in SOURCES if (r := roof(m, d, s, regime)).ridge]
    ends = [v for p in points for v in (p.intensity, p.intensity_low, p.intensity_high) if v is not None]
    left, right = min(ends) / 2, max(r for r in ridges if r is not None) if any(ridges) else 0.0
    # Room for the labels along the slope: the device's own line starts in the lower left corner, within a decade.
    if own_gbps:
        left = min(left, max(low * 1e3 / own_gbps, left / 10))
    right = max(
        1.8 * right, 6 * max(p.intensity or 0 for p in points), 1.3 * max(ends)
    )  # the names of the lines stand at their right ends
    x_decades, y_decades = math.log10(right / left), math.log10(high / low)
    width, height = {1: (7.0, 5.2), 2: (5.4, 4.2)}.get(columns, (4.4, 3.6))
    factor = 1e3 if small else 1.0
    return Scale(
        own=own,
        others=shown,
        left_out=left_out,
        dtypes=dtypes,
        regime=regime,
        x_limits=(left, right),
        y_limits=(low * factor, high * factor),
        inches_per_decade=min(width / x_decades, height / y_decades),
        unit="GFLOP/s" if small else "TFLOP/s",
        factor=factor,
        with_l2=with_l2,
    )


def _bandwidth(machine: Machine) -> float:
    return max((c.value for s in SOURCES if (c := bandwidth(machine, s)) is not None), default=0.0)
