"""The columns of a table: headings with units, the fields behind them, and how a value reads. What is missing is `-`, never 0."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashbench.analysis.metrics import METRICS
from flashbench.errors import UsageError, nearest
from flashbench.records import DTYPES, MODES
from flashbench.store.frame import COLUMNS, TEXT

if TYPE_CHECKING:
    import pandas as pd

Record = Mapping[str, Any]

MISSING = "-"
NOT_TABULAR = ("samples_ms",)
"""Columns that stay in the run's folder: thousands of numbers in a cell help nobody."""


@dataclass(frozen=True, slots=True)
class Column:
    """What a table shows under one heading."""

    heading: str
    fields: tuple[str, ...]
    """The columns of the frame behind it, which CSV and JSON write as they are."""
    text: Callable[[Record], str]
    is_text: bool = False
    notes: Callable[[Record], tuple[str, ...]] = lambda _: ()
    """Sentences that are too long for a cell; they stand below the table."""


def number(value: float | None, digits: int = 4) -> str:
    """`digits` significant digits without an exponent where that can be read: 0.0423, 412.5, 12,345; 2.1e-05."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value and not 1e-4 <= abs(value) < 1e9:
        return f"{value:.2e}"
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    if whole >= digits:
        return f"{value:,.0f}"
    leading = whole or math.floor(math.log10(abs(value))) + 1 if value else 1
    return f"{value:.{digits - leading}f}"


def ratio(value: float | None) -> str:
    """A speed-up as a plain factor: 4.00x is four times as fast, 0.25x a quarter as fast."""
    return MISSING if value is None else f"{value:.2f}x"


def comparison(base_ms: float, new_ms: float) -> str:
    """A change of time in words whose sign and direction agree: `4.00x faster (time -75.0 %)`."""
    change = f"time {100 * (new_ms / base_ms - 1):+.1f} %"
    if new_ms == base_ms:
        return f"as fast ({change})"
    faster = new_ms < base_ms
    return f"{base_ms / new_ms if faster else new_ms / base_ms:.2f}x {'faster' if faster else 'slower'} ({change})"


def _cell(value: Any) -> str:
    """Any recorded value for a reader; integers without separators, so that 16384 is found by searching for it."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, (tuple, list)):
        return ", ".join(map(str, value)) or MISSING
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _status_notes(record: Record) -> tuple[str, ...]:
    """The reason where there is one, and what else a reader must know of the row."""
    reason = record.get("reason")
    return (*((reason,) if reason else ()), *(record.get("warnings") or ()), *(record.get("remarks") or ()))


def _hbm_bytes(record: Record) -> str:
    estimate, low, high = (record.get(name) for name in ("hbm_bytes", "hbm_bytes_low", "hbm_bytes_high"))
    if estimate is None:
        return MISSING
    interval = "" if low is None or high is None else f" [{number(low / 1e9, 3)}, {number(high / 1e9, 3)}]"
    return number(estimate / 1e9, 3) + interval


DEFAULT_COLUMNS = (
    "provider",
    "problem",
    "status",
    "time_ms",
    "spread",
    "tflops",
    "percent_of_peak",
    "speedup",
    "error_norm",
    "peak_net_bytes",
    "hbm_bytes",
    "intensity",
)
"""In the order of what a narrow terminal must not leave out."""

SPECIAL = {
    "status": Column(
        "status",
        ("status", "reason", "warnings", "remarks"),
        lambda record: str(record["status"]),
        is_text=True,
        notes=_status_notes,
    ),
    "hbm_bytes": Column(
        "HBM bytes, modelled (GB) [low, high]", ("hbm_bytes_low", "hbm_bytes", "hbm_bytes_high"), _hbm_bytes
    ),
}
"""Columns that show more than one field of a row; every metric and every recorded field is a column by its own name."""


def column(name: str, frame: pd.DataFrame) -> Column:
    """The column called `name`; UsageError, with the nearest and all known names, when there is none."""
    if name in SPECIAL:
        return SPECIAL[name]
    metric = next((metric for metric in METRICS if metric.name == name), None)
    if metric is not None:
        heading = f"{metric.title} ({metric.unit})" if metric.unit else metric.title
        if name == "speedup":
            references = sorted({text for text in frame.get("reference", ()) if isinstance(text, str)})
            heading += f" over {' / '.join(references)}" if references else ""
            return Column(heading, (name,), lambda record: ratio(record.get(name)))
        return Column(heading, (name,), lambda record: _scaled(record.get(name), metric.scale, metric.digits))
    if name in frame.columns and name not in NOT_TABULAR:
        is_text = name not in COLUMNS or COLUMNS[name][0] == TEXT
        return Column(name, (name,), lambda record: _cell(record.get(name)), is_text)
    known = dict.fromkeys([*DEFAULT_COLUMNS, *(metric.name for metric in METRICS), *map(str, frame.columns)])
    names = [column for column in known if column not in NOT_TABULAR]
    raise UsageError(f"unknown column '{name}'{nearest(name, names)} (known: {', '.join(names)})")


def _scaled(value: float | None, scale: float, digits: int) -> str:
    return MISSING if value is None else number(value * scale, digits)


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as Python values, None where unknown, ordered by problem in numbers (1024 after 128), then as measured."""
    rows = [{str(name): _plain(value) for name, value in row.items()} for row in frame.to_dict("records")]
    return sorted(rows, key=_order)


def _order(record: Record) -> tuple[Any, ...]:
    def place(name: str, known: Sequence[str]) -> int:
        return known.index(record[name]) if record.get(name) in known else len(known)

    mask, _, width = str(record.get("mask") or "").partition(":")
    lengths = ("head_dim", "head_dim_v", "heads_q", "heads_kv", "page_size", "seq_kv", "seq_q", "batch")
    return (
        place("mode", MODES),
        place("dtype", DTYPES),
        {"none": 0, "causal": 1}.get(mask, 2),
        int(width) if width.isdigit() else 0,
        *(record.get(name) or 0 for name in lengths),
    )


def _plain(value: Any) -> Any:
    """A cell of a frame as Python has it: NaN and <NA> are None, NumPy's scalars their Python counterparts."""
    import pandas as pd

    if isinstance(value, (str, tuple, list, dict)) or value is None:
        return value
    if not pd.api.types.is_scalar(value):
        return value
    if pd.isna(value):
        return None
    value = value.item() if hasattr(value, "item") else value
    return value if not isinstance(value, float) or math.isfinite(value) else None
