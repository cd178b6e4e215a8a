"""What a roofline says in words: its footer, the notes for the terminal, and for each point what holds it back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flashbench.model.binding import bind
from flashbench.model.interval import Traffic
from flashbench.records import DTYPES, Case
from flashbench.report.figure import number_text
from flashbench.report.looks import marker_key
from flashbench.report.points import ON_A_ROOFLINE, Point, Selection, select
from flashbench.report.roofline_scale import Scale
from flashbench.report.roofs import SOURCES, Machine, bandwidth, excess, machines_of, without_peak
from flashbench.report.series import conditions_text

if TYPE_CHECKING:
    import pandas as pd


NAMED = 3
"""Points of one remark that are named before the rest is counted."""


def notes(frame: pd.DataFrame, machines: Sequence[Machine]) -> list[str]:
    """What a reader of the picture must know, one line each: rows not drawn, points above their roof, ceilings of another device."""
    selection = select(frame, ON_A_ROOFLINE)
    device = selection.points[0].device_id
    homes = machines_of(machines, selection.devices)
    own = homes[device]
    lines = selection.notes()
    if own.label != device:
        lines.append(f"the rows were measured on {device}, but the ceilings are those of {own.label}")
    lines += [f"no {dtype} peak on {own.label}" for dtype in without_peak(own, _dtypes(selection))]
    if len({p.regime for p in selection.points}) > 1:
        lines.append(
            "the rows mix load regimes (isolated, sustained), which run at different clocks on a power-capped card; compare within one"
        )
    resident: list[Point] = []
    for point in selection.points:
        home = homes[point.device_id]
        why = excess(point, home)
        if why is not None:
            lines.append(f"above the roof of {home.label}: {point.key} ({why})")
        elif point.cache_resident:
            resident.append(point)
    if resident:
        named = "; ".join(point.key for point in resident[:NAMED])
        more = f"; and {len(resident) - NAMED} more" if len(resident) > NAMED else ""
        lines.append(
            f"cache resident: {len(resident)} of {len(selection.points)} points, whose bytes may not have come from HBM ({named}{more})"
        )
    return lines


def _dtypes(selection: Selection) -> list[str]:
    return [dtype for dtype in DTYPES if dtype in {p.dtype for p in selection.points}]


def footer(selection: Selection, scale: Scale) -> list[str]:
    """The paragraphs under a roofline: device and clocks, conventions, markers, what is not drawn."""
    points, own = selection.points, scale.own
    device = points[0].device_id
    where = [f"{device}{f': {own.note}' if own.note else ''}.", conditions_text(points)]
    if own.label != device:
        where.append(f"The ceilings are those of {own.label}, not of this device.")
    sources = {c.source for c in own.ceilings}
    if "spec" in sources:
        where.append("Solid ceilings: data sheet, dense.")
    if "measured" in sources:
        where.append(f"Dashed ceilings: measured here{_conditions(own)}.")
    if scale.others:
        where.append("Grey: not this device." if len(selection.devices) == 1 else "Grey: other devices.")
        where += [f"{m.label}: {m.note}." for m in scale.others if m.own and m.note]
    if scale.left_out:
        where.append(f"Off the scale: {', '.join(m.label for m in scale.left_out)}.")
    counted = (
        "y counts the products of visible (query, key) pairs only: causal its triangle, backward five products (2.5 times forward at d\u00a0=\u00a0d_v). "
        "x divides them by HBM bytes that are modelled, not counted; a thin bar spans no reuse to compulsory traffic."
    )
    counted += _alone(points)
    if scale.with_l2:
        counted += " Small crosses: the same points over the bytes that the L2 hands out (modelled: every block reads for itself)."
        l2 = [c for s in SOURCES if (c := bandwidth(own, s, scale.regime, "l2"))]
        counted += f" L2 of {own.label}: {', '.join(f'{number_text(c.value)} GB/s {c.source}' for c in l2)}."
    if any(c.level == "exp" for c in own.ceilings):
        counted += " Exp unit: one hardware exp per score, which a kernel that computes exps on the FMA units can pass."
    markers = [f"{marker_key({p.dtype for p in points})}."]
    homes = {m.label: m for m in scale.others if m.own}
    above = sum(excess(p, homes.get(p.device_id, own)) is not None for p in points)
    resident = sum(p.cache_resident and excess(p, homes.get(p.device_id, own)) is None for p in points)
    if above:
        markers.append(
            f"Hollow ({above} of {len(points)}): above a ceiling, which wants measuring again unless the data lay in a cache."
        )
    if resident:
        markers.append(
            f"{'Also hollow' if above else 'Hollow'} ({resident} of {len(points)}): cache resident, HBM may not have been read."
        )
    markers += [f"No {dtype} peak on {own.label}, so no roof for it." for dtype in without_peak(own, scale.dtypes)]
    caption = selection.caption()
    return [" ".join(where), counted, " ".join(markers), *([caption] if caption else [])]


def _alone(points: Sequence[Point]) -> str:
    """A sentence that names the providers which compute no attention, or an empty text."""
    names = {
        p.provider: {"scores": "QKᵀ", "values": "PV"}[p.computes] for p in points if p.computes in ("scores", "values")
    }
    listed = ", ".join(f"{name} {product}" for name, product in sorted(names.items()))
    return f" No attention but one product alone, counted as such: {listed}." if names else ""


def _conditions(machine: Machine) -> str:
    """Regime, clocks and power under which the measured ceilings were taken, as far as they are known."""
    measured = [c for c in machine.ceilings if c.source == "measured"]
    words = sorted({str(c.regime) for c in measured if c.regime})
    clocks = [c.sm_clock_mhz for c in measured if c.sm_clock_mhz]
    powers = [c.power_w for c in measured if c.power_w]
    if clocks:
        low, high = min(clocks), max(clocks)
        words.append(f"SM clock {low:,.0f} MHz" if low == high else f"SM clock {low:,.0f} to {high:,.0f} MHz")
    if powers:
        words.append(f"up to {max(powers):,.0f} W")
    return f" ({', '.join(words)})" if words else ""


def explain(frame: pd.DataFrame, machines: Sequence[Machine]) -> list[str]:
    """One line per point: what it reaches, how much of its roof that is, and what holds it back. Raises UsageError as `roofline` does."""
    selection = select(frame, ON_A_ROOFLINE)
    homes = machines_of(machines, selection.devices)
    several = len(homes) > 1
    return [
        f"{p.key}{f' @ {p.device_id}' if several else ''}: {_verdict(p, homes[p.device_id])}" for p in selection.points
    ]


def _verdict(point: Point, own: Machine) -> str:
    """Rate, intensity, and the metrics' sentence; of a frame without one, that of the ceilings alone (no launch, no waves)."""
    reached = f"{number_text(point.tflops or 0)} TFLOP/s at {number_text(point.intensity or 0)} FLOP/byte"
    if point.explanation:
        return f"{reached}, {point.explanation}"
    traffic = Traffic(*(round(value or 0) for value in (point.hbm_bytes_low, point.hbm_bytes, point.hbm_bytes_high)))
    time_ms, tflops = point.time_ms or 0.0, point.tflops or 0.0
    problem = Case.from_key(point.key).problem
    held = bind(time_ms, problem, traffic, round(tflops * time_ms * 1e9), own.ceilings, regime=point.regime or None)
    return f"{reached}, {held.sentence}"
