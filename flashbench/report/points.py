"""Rows of a metrics frame as points: what can be drawn, and what cannot and why."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from flashbench.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

ON_A_ROOFLINE = ("tflops", "intensity")
"""What a point of a roofline needs."""
RowOfPanels = tuple[str, int, int]
"""Mode, head dimension of the keys and of the values: the ceilings of a row of panels are the same."""
_NAMED_IN_CAPTION = 4

_MISSING = {
    "time_ms": "no time",
    "tflops": "no FLOP/s",
    "intensity": "no arithmetic intensity",
    "peak_net_bytes": "no peak memory",
    "hbm_bytes": "no HBM traffic",
    "speedup": "nothing to compare with",
}


@dataclass(frozen=True, slots=True)
class Point:
    """One case as it was measured; a number that is missing, not finite or not above zero is None."""

    key: str
    run: str
    device_id: str
    provider: str
    mode: str
    dtype: str
    mask: str
    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_kv: int
    head_dim: int
    head_dim_v: int
    page_size: int | None
    status: str
    reason: str
    l2: str
    regime: str
    time_ms: float | None
    time_low_ms: float | None
    time_high_ms: float | None
    tflops: float | None
    peak_net_bytes: float | None
    hbm_bytes_low: float | None
    hbm_bytes: float | None
    hbm_bytes_high: float | None
    intensity: float | None
    intensity_low: float | None
    intensity_high: float | None
    speedup: float | None
    reference: str
    """The provider that `speedup` is over, or an empty text."""
    cache_resident: bool
    explanation: str = ""
    """What holds it back, in words, where the metrics have said so."""
    computes: str = ""
    """attention, or one of its products alone: scores or values; an empty text where the metrics do not say."""

    @property
    def seq_len(self) -> int:
        """The length that a sweep varies: keys where there is one query (decoding), else the longer of the two."""
        return max(self.seq_q, self.seq_kv)

    @property
    def heads(self) -> str:
        return str(self.heads_q) if self.heads_q == self.heads_kv else f"{self.heads_q}/{self.heads_kv}"

    @property
    def panel_row(self) -> RowOfPanels:
        return (self.mode, self.head_dim, self.head_dim_v)


@dataclass(frozen=True, slots=True)
class Selection:
    """Points that have what a picture needs, and the rows left out, each with the reason."""

    points: tuple[Point, ...]
    skipped: tuple[tuple[Point, str], ...]

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of the points, in the order of the rows: the first one's ceilings are the picture's own."""
        return tuple(dict.fromkeys(point.device_id for point in self.points))

    def notes(self) -> list[str]:
        """One line per row that is not drawn."""
        return [f"not drawn: {point.key} ({reason})" for point, reason in self.skipped]

    def caption(self) -> str:
        """The rows that are not drawn in one sentence, the first few by name; empty when all are drawn."""
        if not self.skipped:
            return ""
        named = "; ".join(f"{point.key} ({reason})" for point, reason in self.skipped[:_NAMED_IN_CAPTION])
        more = len(self.skipped) - _NAMED_IN_CAPTION
        return f"Not drawn: {named}" + (f"; and {more} more" if more > 0 else "") + "."


def narrow(
    frame: pd.DataFrame,
    *,
    provider: Collection[str] = (),
    mode: Collection[str] = (),
    dtype: Collection[str] = (),
    head_dim: Collection[int] = (),
    mask: Collection[str] = (),
) -> pd.DataFrame:
    """The rows whose columns have one of the values given; an empty collection keeps all.

    Raises UsageError, with the values that are there, when a value leaves nothing.
    """
    wishes: dict[str, Collection[Any]] = {
        "provider": provider,
        "mode": mode,
        "dtype": dtype,
        "head_dim": head_dim,
        "mask": mask,
    }
    for column, values in wishes.items():
        if values:
            kept = frame[frame[column].isin(list(values))]
            if kept.empty:
                known = ", ".join(str(value) for value in sorted(frame[column].unique().tolist()))
                asked = ", ".join(str(value) for value in values)
                raise UsageError(f"no row has {column} {asked}; the rows have {known or 'nothing'}")
            frame = kept
    return frame


def select(frame: pd.DataFrame, needs: Sequence[str]) -> Selection:
    """The points of `frame` (one row per case) that are ok and have every number in `needs`.

    Where the rows come from several devices, the providers of all but the first one carry their device in their name, and so look
    and are labelled as providers of their own. Raises UsageError when no row is left.
    """
    points: list[Point] = []
    skipped: list[tuple[Point, str]] = []
    for row in frame.to_dict("records"):
        point = _point({str(name): value for name, value in row.items()})
        why = _why_not(point, needs)
        if why is None:
            points.append(point)
        else:
            skipped.append((point, why))
    if not points:
        first = f"; the first: {skipped[0][0].key} ({skipped[0][1]})" if skipped else ""
        raise UsageError(
            f"nothing to draw: none of the {len(skipped)} rows can be drawn{first}; measure again or choose another run"
        )
    devices = list(dict.fromkeys(point.device_id for point in (*points, *(point for point, _ in skipped))))
    names = short_names(devices)

    def named(point: Point) -> Point:
        if point.device_id == points[0].device_id:
            return point
        return replace(point, provider=f"{point.provider} @ {names[point.device_id]}")

    return Selection(tuple(map(named, points)), tuple((named(point), why) for point, why in skipped))


def short_names(devices: Sequence[str]) -> dict[str, str]:
    """The first words of each device's id, as many as tell them apart: a100 and h100, or a100-pcie and a100-sxm4."""
    for count in range(1, 1 + max((device.count("-") for device in devices), default=0)):
        names = {device: "-".join(device.split("-")[:count]) for device in devices}
        if len(set(names.values())) == len(names):
            return names
    return {device: device for device in devices}


def _why_not(point: Point, needs: Sequence[str]) -> str | None:
    if point.status == "checked":
        return "checked, not timed"
    if point.status != "ok":
        return f"{point.status}: {point.reason}" if point.reason else point.status
    return next((_MISSING[name] for name in ("time_ms", *needs) if getattr(point, name) is None), None)


_TEXT = frozenset(
    {
        "key",
        "run",
        "device_id",
        "provider",
        "mode",
        "dtype",
        "mask",
        "status",
        "reason",
        "l2",
        "regime",
        "reference",
        "explanation",
        "computes",
    }
)
_WHOLE = frozenset({"batch", "heads_q", "heads_kv", "seq_q", "seq_kv", "head_dim", "head_dim_v"})


def _point(row: dict[str, Any]) -> Point:
    values: dict[str, Any] = {}
    for field in fields(Point):
        value = row.get(field.name)
        if field.name == "cache_resident":
            remarks = row.get("remarks")
            texts = remarks if isinstance(remarks, (tuple, list)) else ()
            values[field.name] = any(str(text).startswith("cache resident") for text in texts)
        elif field.name in _TEXT:
            values[field.name] = value if isinstance(value, str) else ""
        elif field.name == "page_size":
            size = _positive(value)
            values[field.name] = None if size is None else int(size)
        elif field.name in _WHOLE:
            values[field.name] = int(row[field.name])
        else:
            values[field.name] = _positive(value)
    return Point(**values)


def _positive(value: Any) -> float | None:
    """A finite number above zero, else None: neither a logarithm nor a reader can use the others."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) and number > 0 else None
