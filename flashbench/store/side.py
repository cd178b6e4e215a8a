"""What a comparison needs of one run: every case's rounds, the reference kernels beside them, and where it was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flashbench.records import FAILED_STATUSES, Device, Row, from_plain
from flashbench.store.anchors import load_anchors
from flashbench.store.read import Run

_STATUS_ORDER = ("ok", "checked", "unsupported", "oom", *sorted(FAILED_STATUSES))


@dataclass(frozen=True, slots=True)
class Observation:
    """What a comparison needs of one row: a case in one round."""

    round: int
    status: str = "ok"
    median_ms: float | None = None
    """Median of the round's samples."""
    reason: str | None = None
    method: str | None = None
    l2: str | None = None
    regime: str | None = None
    sm_clock_mhz: float | None = None
    """Typical SM clock while the samples were taken."""
    throttle_reasons: tuple[str, ...] | None = None
    peak_bytes: float | None = None
    error_norm: float | None = None
    energy_j: float | None = None
    tflops: float | None = None
    """Useful TFLOP/s: derived on reading (see `with_tflops`), never stored."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What must be the same for two sides to be compared; a field that one side could not read forbids nothing.

    Clocks, temperatures and the GPU's serial are not in it: they drift, or differ between cards of one model.
    """

    device: str | None = None
    """The catalogue's id of the GPU model, or the name of the CPU."""
    capability: tuple[int, int] | None = None
    mig: bool | None = None
    power_limit_w: float | None = None

    def differences(self, other: Identity) -> tuple[str, ...]:
        """In words, what differs; power limits within 1 W are the same limit."""
        found = []
        for name in ("device", "capability", "mig", "power_limit_w"):
            ours, theirs = getattr(self, name), getattr(other, name)
            same = ours == theirs or (name == "power_limit_w" and None not in (ours, theirs) and abs(ours - theirs) < 1)
            if ours is not None and theirs is not None and not same:
                found.append(f"{name.removesuffix('_w').replace('_', ' ')} {_words(ours)} against {_words(theirs)}")
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: every case's rounds, by case key."""

    cases: Mapping[str, tuple[Observation, ...]]
    anchors: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Median times (ms) by round of the reference kernels, measured in the same processes as the cases."""
    identity: Identity = Identity()
    versions: Mapping[str, str] = field(default_factory=dict)
    """driver, torch, triton and libraries: shown when they differ, never a reason to refuse."""
    label: str = ""
    """What a reader knows this side by: a commit, a run's folder, a baseline's file."""


def side_from_rows(
    rows: Iterable[Row],
    medians_ms: Mapping[tuple[str, int], float],
    *,
    anchors: Mapping[str, Mapping[int, float]] | None = None,
    identity: Identity | None = None,
    versions: Mapping[str, str] | None = None,
    label: str = "",
) -> Side:
    """A side from a run's rows and the medians (ms) of their samples by (case key, round)."""
    cases: dict[str, list[Observation]] = {}
    for row in rows:
        timing, state = row.timing, row.state
        clocks = state.sm_clock_mhz if state else None
        seen = Observation(
            round=row.round,
            status=row.status,
            median_ms=medians_ms.get((row.key, row.round)),
            reason=row.reason,
            method=timing.method if timing else None,
            l2=timing.l2 if timing else None,
            regime=timing.regime if timing else None,
            sm_clock_mhz=(clocks[0] + clocks[1]) / 2 if clocks else None,
            throttle_reasons=state.throttle_reasons if state else None,
            peak_bytes=row.memory.peak_bytes - row.memory.before_bytes if row.memory else None,
            error_norm=row.check.error_norm if row.check else None,
            energy_j=row.energy_j,
        )
        cases.setdefault(row.key, []).append(seen)
    ordered = {key: tuple(sorted(seen, key=lambda o: o.round)) for key, seen in cases.items()}
    return Side(ordered, anchors or {}, identity or Identity(), versions or {}, label)


def identity_of(device: Device, device_id: str) -> Identity:
    """What of a device must be the same to compare."""
    return Identity(device_id, device.capability, device.mig, device.power_limit_w)


def side_of_run(run: Run) -> Side:
    """The side that a stored run is.

    Its header may say that some cases are compared under another key (`compared_as`): those of `ab` between two providers.
    """
    names: Mapping[str, str] = run.header.get("compared_as") or {}
    device = from_plain(
        Device, {"kind": "cpu", "name": "unknown", "memory_bytes": 0, **(run.header.get("device") or {})}
    )
    medians = {visit: statistics.median(samples) for visit, samples in run.samples_ms.items() if samples}
    side = side_from_rows(
        run.rows,
        medians,
        anchors=load_anchors(run.path),
        identity=identity_of(device, run.device_id),
        versions={"flashbench": str(run.header.get("flashbench", "")), **device.versions},
        label=str(run.header.get("label") or run.path),
    )
    if not names:
        return side
    return replace(side, cases={names.get(key, key): rounds for key, rounds in side.cases.items()})


def staged(side: Side, rounds: int | None) -> tuple[Side, Side]:
    """The rounds of the screening, numbered below `rounds`, and the fresh ones after them; all of them and none when it is None."""
    if rounds is None:
        return side, replace(side, cases={}, anchors={})
    return _part(side, lambda number: number < rounds), _part(side, lambda number: number >= rounds)


def _part(side: Side, wanted: Callable[[int], bool]) -> Side:
    kept = {key: tuple(seen for seen in seens if wanted(seen.round)) for key, seens in side.cases.items()}
    anchors = {name: {n: ms for n, ms in times.items() if wanted(n)} for name, times in side.anchors.items()}
    return replace(side, cases={key: seens for key, seens in kept.items() if seens}, anchors=anchors)


def with_tflops(side: Side, useful_flops: Callable[[str], float]) -> Side:
    """The side with TFLOP/s beside each time, from the useful FLOPs of a case key."""

    def derive(key: str, seen: Observation) -> Observation:
        time_ms = seen.median_ms
        return seen if not time_ms else replace(seen, tflops=useful_flops(key) / time_ms / 1e9)

    return replace(side, cases={key: tuple(derive(key, seen) for seen in rounds) for key, rounds in side.cases.items()})


def slowed(side: Side, fraction: float, keys: Iterable[str] | None = None) -> Side:
    """The side with the given cases (all, when None) slower by a fraction of their time: what the gate's self-test must find."""
    chosen = set(side.cases if keys is None else keys)

    def slow(seen: Observation) -> Observation:
        return seen if seen.median_ms is None else replace(seen, median_ms=seen.median_ms * (1 + fraction))

    cases = {key: tuple(map(slow, rounds)) if key in chosen else rounds for key, rounds in side.cases.items()}
    return replace(side, cases=cases)


def typical_ms(rounds: Iterable[Observation]) -> float | None:
    """Median over the rounds that have a time; None of none."""
    times = sorted(o.median_ms for o in rounds if o.median_ms is not None and math.isfinite(o.median_ms))
    middle = len(times) // 2
    return None if not times else times[middle] if len(times) % 2 else (times[middle - 1] + times[middle]) / 2


def worst_status(rounds: Iterable[Observation]) -> str:
    """The status that speaks for all rounds; a round that failed is not outvoted."""
    return max((o.status for o in rounds), key=_STATUS_ORDER.index, default="ok")


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ".".join(map(str, value))
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)
