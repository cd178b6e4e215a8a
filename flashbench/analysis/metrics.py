"""Derived columns. A corrected formula here changes every old run on reading, without a GPU.

Three steps, each a DataFrame: visits (`flashbench.store.frame`), cases (`summarise`), cases with metrics (`derive`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from flashbench.analysis import statistics
from flashbench.analysis.measured import Measured
from flashbench.analysis.summary import summarise as summarise
from flashbench.errors import UsageError, nearest
from flashbench.hardware.catalogue import GpuSpec
from flashbench.hardware.ceilings import Ceiling, spec_ceilings
from flashbench.model.schedule import Schedule
from flashbench.records import Device

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Metric:
    """A column of numbers. `name` tells the unit in which it is stored; a reader is shown value x `scale` in `unit`."""

    name: str
    title: str
    unit: str
    better: Literal["lower", "higher"] | None
    kind: Literal["measured", "modelled", "spec"]
    compute: Callable[[Measured], float | None] | None = field(default=None, repr=False)
    """None for a column of the summary that stands as it was recorded."""
    scale: float = 1.0
    digits: int = 4
    """Significant digits that a reader is shown."""


def _part(record: object, name: str) -> float | None:
    """A field of a record that may not be there."""
    value: float | None = getattr(record, name, None)
    return value


def _percent(value: float | None, of: float | None) -> float | None:
    return 100 * value / of if value is not None and of else None


def _percent_of_ceiling(case: Measured) -> float | None:
    ceiling = case.ceiling("compute")
    return _percent(case.tflops, ceiling.value) if ceiling and ceiling.source == "measured" else None


def _per_joule(case: Measured) -> float | None:
    energy_j = case.row.get("energy_j")
    return case.flops / 1e12 / float(energy_j) if energy_j is not None and energy_j > 0 else None


METRICS: tuple[Metric, ...] = (
    Metric("time_ms", "time", "ms", "lower", "measured", lambda x: x.time_ms),
    Metric("time_low_ms", "time, low end", "ms", "lower", "measured", lambda x: x.interval_ms and x.interval_ms[0]),
    Metric("time_high_ms", "time, high end", "ms", "lower", "measured", lambda x: x.interval_ms and x.interval_ms[1]),
    Metric("spread", "spread", "%", "lower", "measured", lambda x: x.spread, scale=100, digits=2),
    Metric("rounds_sd", "sd over rounds", "%", "lower", "measured", lambda x: x.rounds_sd, scale=100, digits=2),
    Metric("first_call_ms", "first call", "ms", "lower", "measured"),
    Metric("flops", "useful work", "GFLOP", None, "modelled", lambda x: x.flops, scale=1e-9),
    Metric("executed_flops", "executed work", "GFLOP", "lower", "modelled", lambda x: x.executed, scale=1e-9),
    Metric("tflops", "rate", "TFLOP/s", "higher", "measured", lambda x: x.tflops),
    Metric(
        "percent_of_peak", "of spec peak", "%", "higher", "spec", lambda x: _percent(x.tflops, x.peak_tflops), digits=3
    ),
    Metric("percent_of_ceiling", "of measured peak", "%", "higher", "measured", _percent_of_ceiling, digits=3),
    Metric("peak_bytes", "memory with inputs", "MiB", "lower", "measured", scale=2**-20),
    Metric("peak_net_bytes", "net memory", "MiB", "lower", "measured", lambda x: x.peak_net_bytes, scale=2**-20),
    Metric("hbm_bytes_low", "HBM bytes, low", "GB", None, "modelled", lambda x: _part(x.traffic, "low"), scale=1e-9),
    Metric("hbm_bytes", "HBM bytes", "GB", None, "modelled", lambda x: _part(x.traffic, "estimate"), scale=1e-9),
    Metric("hbm_bytes_high", "HBM bytes, high", "GB", None, "modelled", lambda x: _part(x.traffic, "high"), scale=1e-9),
    Metric("hbm_gbps", "HBM rate", "GB/s", None, "modelled", lambda x: x.hbm_gbps),
    Metric("intensity_low", "intensity, low", "FLOP/byte", None, "modelled", lambda x: _part(x.intensity, "low")),
    Metric("intensity", "intensity", "FLOP/byte", None, "modelled", lambda x: _part(x.intensity, "estimate")),
    Metric("intensity_high", "intensity, high", "FLOP/byte", None, "modelled", lambda x: _part(x.intensity, "high")),
    Metric("error_norm", "error", "", "lower", "measured", digits=2),
    Metric("energy_j", "energy of a call", "J", "lower", "measured"),
    Metric("tflop_per_j", "work per energy", "TFLOP/J", "higher", "measured", lambda x: _per_joule(x)),
    Metric(
        "speedup",
        "speed-up",
        "",
        "higher",
        "measured",
        lambda x: x.reference_ms / x.time_ms if x.reference_ms and x.time_ms else None,
    ),
)
"""Every metric by name: what is here appears in tables, exports, gates and plots."""


ALONE = {
    "scores": "no attention: QKᵀ alone, one matrix product that writes every score",
    "values": "no attention: PV alone, one matrix product that reads every weight",
}


def _remarks(case: Measured) -> tuple[str, ...]:
    """What a reader must know of a row that is ok before believing it."""
    found = []
    rounds = case.row["samples_ms"] or ()
    if case.computes in ALONE:
        found.append(ALONE[case.computes])
    if case.time_ms is None:
        found.append("no samples")
    elif case.spread is None:
        found.append("too few samples for a spread")
    if any(statistics.bimodal(samples) for samples in rounds):
        found.append("the times fall into two groups")
    if case.traffic and case.l2_bytes and case.traffic.low <= case.l2_bytes:
        found.append(f"cache resident: inputs and outputs fit the L2 of {case.l2_bytes / 2**20:.3g} MiB")
    for level, value in (("hbm", case.hbm_gbps), ("compute", case.tflops)):
        ceiling = case.ceiling(level)
        if ceiling and value and value > ceiling.value:
            again = "; measure the ceilings again" if ceiling.source == "measured" and level == "compute" else ""
            roof = {"hbm": "HBM", "compute": "compute"}[level]
            found.append(f"above the {ceiling.source} {roof} roof of {ceiling.value:,.4g} {ceiling.unit}{again}")
    return tuple(found)


TEXTS: dict[str, Callable[[Measured], Any]] = {
    "computes": lambda x: x.computes,
    "remarks": _remarks,
    "binding": lambda x: x.binding.name if x.binding else None,
    "explanation": lambda x: x.binding.sentence if x.binding else None,
}
"""Derived columns of words: what the provider computes, what to know of a row, the ceiling that holds it, and the sentence that says so."""


def derive(
    summary: pd.DataFrame,
    device: Device,
    spec: GpuSpec | None,
    ceilings: Iterable[Ceiling] = (),
    *,
    models: Mapping[str, tuple[str, Schedule]] | None = None,
    reference: str | None = None,
) -> pd.DataFrame:
    """The summary of one device's cases with the columns of METRICS and TEXTS, and `reference`.

    `ceilings` are those measured on this device; its data sheet's are added.
    `models` holds each provider's algorithm (`flashbench.model.traffic`) and schedule; a provider without one has no modelled bytes.
    `reference` is
    the provider that speed-ups are over. Cases that are not ok have no derived numbers. UsageError when no row is of `reference`.
    """
    import pandas as pd

    # The only missing value among objects is None; of numbers pandas makes NaN and <NA>.
    known = summary.astype(object).where(summary.notna(), None)
    rows = [{str(name): value for name, value in row.items()} for row in known.to_dict("records")]
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    if reference is not None and reference not in providers:
        raise UsageError(
            f"no row is of '{reference}'{nearest(reference, providers)} (rows are of: {', '.join(providers)})"
        )
    fixed = (device, spec, (*ceilings, *(spec_ceilings(spec) if spec else ())))
    cases = [Measured(row, *fixed, _model(row, models or {}), None) if row["status"] == "ok" else None for row in rows]
    times = {_same(x): x.time_ms for x in cases if x is not None and x.row["provider"] == reference}
    cases = [x and Measured(x.row, *fixed, x.model, times.get(_same(x))) for x in cases]

    result = summary.reset_index(drop=True)
    for metric in METRICS:
        if metric.compute is not None:
            values = [None if x is None else metric.compute(x) for x in cases]
            result[metric.name] = pd.Series(values, dtype="float64")
    for name, text in TEXTS.items():
        result[name] = pd.Series([None if x is None else text(x) for x in cases], dtype="object")
    result["reference"] = pd.Series([reference if x and x.reference_ms else None for x in cases], dtype="object")
    return result


def _model(row: Mapping[str, Any], models: Mapping[str, tuple[str, Schedule]]) -> tuple[str, Schedule] | None:
    """The model of what ran: where a library chose (`sdpa`), that of its choice (`sdpa-math`) rather than its own."""
    chosen = f"{row['provider']}-{row['backend']}" if row.get("backend") else row["provider"]
    return models.get(chosen, models.get(row["provider"]))


def _same(case: Measured) -> tuple[Any, ...]:
    """What peers share: run, problem, what they compute of it and how they were measured."""
    return (*(case.row[name] for name in ("device_id", "run", "problem", "l2", "regime")), case.computes)
