"""By which rules two sides are judged: margins, error rates, rounds, and what fails the job."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from flashbench.errors import UsageError, nearest
from flashbench.store.side import Observation

if TYPE_CHECKING:
    from flashbench.config.schema import Gate

Pairing = Literal["paired", "stored"]
"""paired: round i of one side ran beside round i of the other; stored: the sides come from two sessions."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure that can get worse. The default absolute margin is in the metric's unit."""

    name: str
    unit: str
    field: str
    """Attribute of `Observation` that holds it."""
    lower_is_better: bool = True
    margin_abs: float = 0.0
    per_session: bool = False
    """Whether the machine's mood moves it, so that stored values need anchors and a session's spread."""

    def value(self, seen: Observation) -> float | None:
        found: float | None = getattr(seen, self.field)
        return found


METRICS = {
    metric.name: metric
    for metric in (
        Metric("time", "ms", "median_ms", margin_abs=1e-3, per_session=True),
        Metric("tflops", "TFLOP/s", "tflops", lower_is_better=False, per_session=True),
        Metric("memory", "bytes", "peak_bytes", margin_abs=2.0**20),
        Metric("error", "1", "error_norm"),
        Metric("energy", "J", "energy_j", per_session=True),
    )
}


@dataclass(frozen=True, slots=True)
class Margins:
    """How much worse one case may get: fractions of the base, (new - base) / base, and an absolute amount beside them."""

    paired: float
    stored: float
    absolute: float


@dataclass(frozen=True, slots=True)
class Rules:
    """The defaults are those whose error rates docs/gate.md tabulates."""

    metric: Metric = METRICS["time"]
    margin: float = 0.02
    stored_margin: float = 0.05
    unanchored_margin: float = 0.08
    """Least margin between sessions that share no anchor."""
    margin_abs: float | None = None
    """None: the metric's own."""
    overrides: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Glob over case keys -> margin, stored_margin, margin_abs; where several match, the later one decides."""
    group_share: float = 0.5
    """Margin of a group's geometric mean, as a share of the margin of a case: many cases together show less."""
    group_cases: int = 3
    """Fewer cases than this are not a group."""
    alpha: float = 0.05
    """One-sided level of the screening, per case."""
    family_alpha: float = 0.05
    """Family-wise level of the confirmation, over everything that was flagged."""
    rounds: int = 6
    confirm_rounds: int = 12
    min_rounds: int = 5
    session_sd: float = 0.01
    """Standard deviation of (case over anchor) between two sessions: 1.5 % a session at correlation 0.9 gives 0.95 %."""
    unanchored_session_sd: float = 0.021
    """The same without an anchor: 1.5 % in each of two sessions."""
    fail_on: frozenset[str] = frozenset({"regression", "failed", "missing"})
    allow_missing: tuple[str, ...] = ()
    """Globs over the keys of cases that may be missing."""
    min_cases: int = 1
    """Fewer cases in common than this is no verdict."""

    def margins(self, key: str) -> Margins:
        """The margins of the case with this key."""
        absolute = self.metric.margin_abs if self.margin_abs is None else self.margin_abs
        given = {"margin": self.margin, "stored_margin": self.stored_margin, "margin_abs": absolute}
        for glob, override in self.overrides.items():
            if fnmatch.fnmatchcase(key, glob):
                given |= override
        return Margins(given["margin"], given["stored_margin"], given["margin_abs"])

    def may_be_missing(self, key: str) -> bool:
        return any(fnmatch.fnmatchcase(key, glob) for glob in self.allow_missing)

    def narrowed(self, keys: Iterable[str]) -> Rules:
        """The rules without globs that match none of the keys: for a run that was narrowed on the command line."""
        known = list(keys)

        def matches(glob: str) -> bool:
            return any(fnmatch.fnmatchcase(key, glob) for key in known)

        overrides = {glob: override for glob, override in self.overrides.items() if matches(glob)}
        return replace(self, overrides=overrides, allow_missing=tuple(filter(matches, self.allow_missing)))

    def check_globs(self, keys: Iterable[str]) -> None:
        """UsageError when an override, or a permission to be missing, matches none of the keys of either side."""
        known = sorted(keys)
        for glob in (*self.overrides, *self.allow_missing):
            if not any(fnmatch.fnmatchcase(key, glob) for key in known):
                hint = nearest(glob, known)
                example = f" (a case reads like '{known[0]}')" if known and not hint else ""
                raise UsageError(f"gate: '{glob}' matches no case{hint}{example}")


def turns(round_number: int) -> tuple[Literal["base", "new"], Literal["base", "new"]]:
    """Which side of a paired round runs first and second: ABBA, so that a steady drift favours neither."""
    return ("base", "new") if round_number % 2 == 0 else ("new", "base")


def rules_from_config(gate: Gate, metric: str = "time") -> Rules:
    """The rules that the `gate:` block of a configuration asks for, for one of its metrics; UsageError for an unknown one."""
    if metric not in METRICS:
        raise UsageError(f"unknown metric '{metric}'{nearest(metric, METRICS)} (known: {', '.join(METRICS)})")
    chosen = METRICS[metric]
    is_time = metric == "time"  # the configuration's floor is in microseconds
    overrides = {}
    for glob, override in gate.overrides.items():
        given = {"margin": override.margin, "stored_margin": override.stored_margin}
        if is_time and override.floor_us is not None:
            given["margin_abs"] = override.floor_us / 1e3
        overrides[glob] = {name: value for name, value in given.items() if value is not None}
    return Rules(
        metric=chosen,
        margin=gate.margin,
        stored_margin=gate.stored_margin,
        margin_abs=gate.floor_us / 1e3 if is_time else None,
        overrides=overrides,
        fail_on=frozenset(gate.fail_on),
        allow_missing=("*",) if gate.allow_missing else (),
        min_cases=gate.min_cases,
    )
