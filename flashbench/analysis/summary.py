"""One line per case: the visits of all rounds put together, still only what was recorded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from flashbench.store.frame import COLUMNS, INTEGER, NUMBER

if TYPE_CHECKING:
    import pandas as pd

Cells = Sequence[Any]

SEVERITY = ("ok", "checked", "unsupported", "oom", "invalid", "timeout", "crashed", "error", "incorrect")
"""From best to worst: a case is as good as its worst round."""


def _distinct(cells: Cells) -> str:
    return " / ".join(dict.fromkeys(cells))


def _union(cells: Cells) -> tuple[str, ...]:
    return tuple(dict.fromkeys(item for cell in cells for item in cell))


def _first(cells: Cells) -> Any:
    return cells[0]


SAME = tuple(itertools.takewhile(lambda name: name != "round", COLUMNS))
"""Columns that a case's visits share: run, device and problem."""

MERGED: dict[str, Callable[[Cells], Any]] = {
    "warnings": _union,
    "started": min,
    "backend": _distinct,
    "method": _distinct,
    "l2": _distinct,
    "regime": _distinct,
    "samples_ms": tuple,
    "sample_count": sum,
    "duty_cycle": median,
    "converged": all,
    "error_norm": max,
    "error_max": max,
    "tolerance_norm": max,
    "naive_error_norm": max,
    "run_to_run_max": max,
    "before_bytes": _first,
    "peak_bytes": _first,
    "first_call_ms": max,
    "seconds": sum,
    "energy_j": median,
    "sm_clock_low_mhz": min,
    "sm_clock_high_mhz": max,
    "power_w": median,
    "temperature_c": max,
    "throttle_reasons": _union,
    "launch": _first,
}
"""How the known cells of a column become one; a column without known cells stays unknown."""


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """One line per (run, case) of a frame of visits (`flashbench.store.frame`), in the order of measuring.

    `rounds` counts the visits, `samples_ms` holds a tuple with one array per round. The status is that of the worst round and the reason
    says how many rounds had it. Both memory figures are those of the visit that allocated most.
    """
    import pandas as pd

    cases = frame.reset_index(drop=True).groupby(["device_id", "run", "key"], sort=False)
    lines = [_line(visits) for _, visits in cases]
    kinds = {name: kind for name, (kind, _) in COLUMNS.items()} | {"rounds": INTEGER}
    columns = {}
    for name in (*SAME, "rounds", "status", "reason", *MERGED):
        kind = kinds[name] if kinds[name] in (INTEGER, NUMBER) else "object"
        columns[name] = pd.Series([line[name] for line in lines], dtype=kind)
    return pd.DataFrame(columns)


def _line(visits: pd.DataFrame) -> dict[str, Any]:
    line: dict[str, Any] = {name: visits[name].iloc[0] for name in SAME}
    line["rounds"] = len(visits)
    line["status"], line["reason"] = _status(visits["status"].tolist(), visits["reason"].tolist())
    allocated = (visits["peak_bytes"] - visits["before_bytes"]).dropna()
    if len(allocated):
        most = visits.loc[[allocated.idxmax()]]
        visits = visits.assign(before_bytes=most["before_bytes"].iloc[0], peak_bytes=most["peak_bytes"].iloc[0])
    for name, merge in MERGED.items():
        cells = [cell for cell, known in zip(visits[name], visits[name].notna(), strict=True) if known]
        line[name] = merge(cells) if cells else None
    return line


def _status(statuses: Sequence[str], reasons: Sequence[str | None]) -> tuple[str, str | None]:
    worst = max(statuses, key=lambda status: SEVERITY.index(status) if status in SEVERITY else len(SEVERITY))
    count = statuses.count(worst)
    reason = reasons[statuses.index(worst)]
    if count < len(statuses):
        reason = f"in {count} of {len(statuses)} rounds" + (f": {reason}" if reason else "")
    return worst, reason
