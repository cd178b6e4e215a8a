"""A run as a DataFrame: one line per visit, only what was recorded; everything derived is in `flashbench.analysis.metrics`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flashbench.records import Row
from flashbench.store.read import Run

if TYPE_CHECKING:
    import pandas as pd


def _part(part: str, name: str) -> Callable[[Run, Row], Any]:
    return lambda _, row: getattr(getattr(row, part), name, None)


def _problem(name: str) -> Callable[[Run, Row], Any]:
    return lambda _, row: getattr(row.case.problem, name)


def _row(name: str) -> Callable[[Run, Row], Any]:
    return lambda _, row: getattr(row, name)


def _clock(end: int) -> Callable[[Run, Row], Any]:
    return lambda _, row: row.state.sm_clock_mhz[end] if row.state and row.state.sm_clock_mhz else None


TEXT, INTEGER, NUMBER, OBJECT = "text", "Int64", "float64", "object"

COLUMNS: dict[str, tuple[str, Callable[[Run, Row], Any]]] = {
    "run": (TEXT, lambda run, _: run.path.name),
    "device_id": (TEXT, lambda run, _: run.device_id),
    "key": (TEXT, _row("key")),
    "provider": (TEXT, lambda _, row: row.case.provider),
    "problem": (TEXT, lambda _, row: row.case.problem.label),
    "mode": (TEXT, _problem("mode")),
    "dtype": (TEXT, _problem("dtype")),
    "batch": (INTEGER, _problem("batch")),
    "heads_q": (INTEGER, _problem("heads_q")),
    "heads_kv": (INTEGER, _problem("heads_kv")),
    "seq_q": (INTEGER, _problem("seq_q")),
    "seq_kv": (INTEGER, _problem("seq_kv")),
    "head_dim": (INTEGER, _problem("head_dim")),
    "head_dim_v": (INTEGER, _problem("head_dim_v")),
    "mask": (TEXT, _problem("mask")),
    "page_size": (INTEGER, _problem("page_size")),
    "round": (INTEGER, _row("round")),
    "status": (TEXT, _row("status")),
    "reason": (TEXT, _row("reason")),
    "warnings": (OBJECT, _row("warnings")),
    "started": (TEXT, _row("started")),
    "backend": (TEXT, _row("backend")),
    "method": (TEXT, _part("timing", "method")),
    "l2": (TEXT, _part("timing", "l2")),
    "regime": (TEXT, _part("timing", "regime")),
    "samples_ms": (OBJECT, lambda run, row: _samples(run, row)),
    "sample_count": (INTEGER, _part("timing", "sample_count")),
    "duty_cycle": (NUMBER, _part("timing", "duty_cycle")),
    "converged": (OBJECT, _part("timing", "converged")),
    "error_norm": (NUMBER, _part("check", "error_norm")),
    "error_max": (NUMBER, _part("check", "error_max")),
    "tolerance_norm": (NUMBER, _part("check", "tolerance_norm")),
    "naive_error_norm": (NUMBER, _part("check", "naive_error_norm")),
    "run_to_run_max": (NUMBER, _part("check", "run_to_run_max")),
    "before_bytes": (INTEGER, _part("memory", "before_bytes")),
    "peak_bytes": (INTEGER, _part("memory", "peak_bytes")),
    "first_call_ms": (NUMBER, _row("first_call_ms")),
    "seconds": (NUMBER, _row("seconds")),
    "energy_j": (NUMBER, _row("energy_j")),
    "sm_clock_low_mhz": (INTEGER, _clock(0)),
    "sm_clock_high_mhz": (INTEGER, _clock(-1)),
    "power_w": (NUMBER, _part("state", "power_w")),
    "temperature_c": (INTEGER, _part("state", "temperature_c")),
    "throttle_reasons": (OBJECT, _part("state", "throttle_reasons")),
    "launch": (OBJECT, _row("launch")),
}
"""Column -> (kind, value of a row). Text and objects are None where unknown, integers <NA>, numbers NaN."""


def frame(*runs: Run) -> pd.DataFrame:
    """One line per visit of the runs, with the columns of `COLUMNS` in that order.

    `samples_ms` holds a float64 array or None, `warnings` and `throttle_reasons` tuples of text. Text keeps the object dtype: what
    pandas takes for text of its own turns a missing value into NaN, and a NaN in a column of reasons reads as a measurement.
    """
    import pandas as pd

    visits = [(run, row) for run in runs for row in run.rows]
    columns = {}
    for name, (kind, value) in COLUMNS.items():
        cells = [value(run, row) for run, row in visits]
        columns[name] = pd.Series(cells, dtype="object" if kind in (TEXT, OBJECT) else kind)
    return pd.DataFrame(columns)


def _samples(run: Run, row: Row) -> Any:
    import numpy as np

    samples = run.samples_ms.get((row.key, row.round))
    return None if samples is None else np.asarray(samples, dtype=np.float64)
