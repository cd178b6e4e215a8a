"""Stored baselines: one file per device and configuration, a case a line, sorted, so that a change reads well in a diff.

    <root>/<device id>/<config name>.jsonl

The first line says what was measured where, from which run, by whom and why; the anchors (reference kernels measured in the
same rounds) stand there too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashbench.errors import StoreError, UsageError, nearest
from flashbench.records import STATUSES, from_plain, to_plain
from flashbench.store.side import Identity, Observation, Side, typical_ms, worst_status

SCHEMA_VERSION = 1
KIND = "flashbench baseline"
_ROUND_FIELDS = ("sm_clock_mhz", "throttle_reasons", "peak_bytes", "error_norm", "energy_j")


@dataclass(frozen=True, slots=True)
class Baseline:
    """A stored side and its history."""

    side: Side
    config: str
    run: str | None = None
    """The run's folder that it was taken from."""
    who: str | None = None
    why: str | None = None
    written: str | None = None
    """UTC, ISO 8601."""


def baseline_path(root: Path | str, device_id: str, config: str) -> Path:
    """Where the baseline of a device and a configuration lies; UsageError for a name that would leave the folder."""
    for name in (device_id, config):
        if not name or name.startswith(".") or "/" in name or "\\" in name:
            raise UsageError(f"'{name}' cannot name a baseline; use letters, digits, '-', '.' and '_'")
    return Path(root) / device_id / f"{config}.jsonl"


def write_baseline(path: Path, baseline: Baseline) -> None:
    """Write all of the file or nothing; UsageError for a side without cases, and when the disk refuses."""
    if not baseline.side.cases:
        raise UsageError(f"no case to store in '{path}'; a baseline needs at least one measured case")
    header = {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "config": baseline.config,
        **to_plain({"run": baseline.run, "who": baseline.who, "why": baseline.why, "written": baseline.written}),
        "identity": to_plain(baseline.side.identity),
        "versions": dict(sorted(baseline.side.versions.items())),
        "anchors": {name: _by_round(sorted(anchor.items())) for name, anchor in sorted(baseline.side.anchors.items())},
    }
    header = {name: value for name, value in header.items() if value is not None}
    lines = [header, *(_plain_case(key, rounds) for key, rounds in sorted(baseline.side.cases.items()))]
    text = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
    draft = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write the baseline '{path}' ({error.strerror})") from error


def read_baseline(path: Path) -> Baseline:
    """The baseline at `path`. A field that its schema did not have yet is None.

    Raises StoreError when the file is not there, is damaged (with its line), or is of a newer schema.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        siblings = [p.stem for p in path.parent.glob("*.jsonl")] if path.parent.is_dir() else []
        hint = nearest(path.stem, siblings) or "; store one with `flashbench baseline update RUN`"
        raise StoreError(f"no baseline at '{path}'{hint}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"the baseline '{path}' cannot be read ({error}); restore it from version control") from error
    records = [_parse(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not records or records[0][1].get("kind") != KIND:
        raise StoreError(f"{path}:1: not a baseline of flashbench: its first line does not say so")
    header = records[0][1]
    version = header.get("schema_version")
    if not isinstance(version, int) or version < 0:
        raise StoreError(f"{path}:1: schema_version is {version!r}, not a version number; restore the file")
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path}: written with schema {version}, this flashbench reads up to {SCHEMA_VERSION}; upgrade flashbench, or store it anew"
        )
    cases: dict[str, tuple[Observation, ...]] = {}
    number = 1
    try:
        anchors = {name: dict(_in_rounds(line)) for name, line in (header.get("anchors") or {}).items()}
        side = Side(
            {}, anchors, from_plain(Identity, header.get("identity") or {}), header.get("versions") or {}, str(path)
        )
        for line, record in records[1:]:
            number = line  # for the message, should this line be the damaged one
            key = record["key"]
            if key in cases:
                raise ValueError(f"a second line of '{key}'")
            cases[key] = _case_from_plain(record)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise StoreError(f"{path}:{number}: damaged ({what}); restore the file, or store it anew") from error
    if not cases:
        raise StoreError(f"{path}: holds no case; store it anew with `flashbench baseline update RUN`")
    facts = {name: header.get(name) for name in ("run", "who", "why", "written")}
    return Baseline(replace(side, cases=cases), str(header.get("config", path.stem)), **facts)


def baseline_changes(old: Side | None, new: Side) -> tuple[str, ...]:
    """One line per case that storing `new` in place of `old` would add, remove or move, the largest slowdown first."""
    before = old.cases if old else {}
    moved = []
    for key in before.keys() & new.cases.keys():
        was, now = typical_ms(before[key]), typical_ms(new.cases[key])
        if was and now and was != now:
            moved.append((now / was - 1, f"{key}: {was:.4g} -> {now:.4g} ms ({now / was - 1:+.1%})"))
    added = [f"added: {key}" for key in sorted(new.cases.keys() - before.keys())]
    removed = [f"removed: {key}" for key in sorted(before.keys() - new.cases.keys())]
    return (*(text for _, text in sorted(moved, reverse=True)), *removed, *added)


def _plain_case(key: str, rounds: Sequence[Observation]) -> dict[str, Any]:
    """A case as one line. Columns that hold one value in every round are written once, and those that hold none not at all."""
    status = worst_status(rounds)
    told = [o for o in rounds if o.status == status]
    line: dict[str, Any] = {"key": key}
    if status != "ok":
        line |= {"status": status, "reason": next((o.reason for o in told if o.reason), None)}
    for name in ("method", "l2", "regime"):
        line[name] = getattr(told[0], name) if told else None
    line |= _by_round([(o.round, o.median_ms) for o in told])
    for name in _ROUND_FIELDS:
        column = [getattr(o, name) for o in told]
        if name == "throttle_reasons":
            column = [None if value is None else ", ".join(value) for value in column]
        else:
            column = _numbers(column)
        line[name] = column[0] if column and all(value == column[0] for value in column) else column
    return {name: value for name, value in line.items() if value is not None}


def _case_from_plain(line: Mapping[str, Any]) -> tuple[Observation, ...]:
    key = line["key"]
    words = {name: line.get(name) for name in ("reason", "method", "l2", "regime")}
    columns = {"median_ms": line["median_ms"], **{name: line.get(name) for name in _ROUND_FIELDS}}
    status = line.get("status", "ok")
    if status not in STATUSES:
        raise ValueError(f"status of '{key}' is {status!r}")
    short = [
        name for name, values in columns.items() if isinstance(values, list) and len(values) != len(line["median_ms"])
    ]
    if short:
        raise ValueError(f"in '{key}', {short[0]} and median_ms are of different lengths")
    rounds = []
    for index, (number, _) in enumerate(_in_rounds(line)):
        facts = {name: values[index] if isinstance(values, list) else values for name, values in columns.items()}
        reasons = facts.pop("throttle_reasons")
        if reasons is not None:
            reasons = tuple(reasons.split(", ")) if reasons else ()
        odd = next((f"{name} holds {value!r}" for name, value in facts.items() if not _is_number(value)), None)
        if odd:
            raise ValueError(f"in '{key}', {odd}")
        rounds.append(Observation(number, status, throttle_reasons=reasons, **words, **facts))
    return tuple(rounds)


def _by_round(medians_ms: Sequence[tuple[int, float | None]]) -> dict[str, Any]:
    """Medians in a row; their round numbers only where they are not 0, 1, 2, ..."""
    numbers = [number for number, _ in medians_ms]
    rounds = {} if numbers == list(range(len(numbers))) else {"rounds": numbers}
    return {**rounds, "median_ms": _numbers(ms for _, ms in medians_ms)}


def _in_rounds(line: Mapping[str, Any]) -> list[tuple[int, Any]]:
    """(round, median) of a line; ValueError when the two do not go together."""
    medians = line["median_ms"]
    numbers = line.get("rounds", list(range(len(medians))))
    if not all(type(number) is int for number in numbers) or len(set(numbers)) < len(numbers):
        raise ValueError(f"rounds are {numbers!r}")
    odd = next((ms for ms in medians if not _is_number(ms)), None)
    if odd is not None:
        raise ValueError(f"median_ms holds {odd!r}")
    return list(zip(numbers, medians, strict=True))


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _parse(path: Path, number: int, line: str) -> tuple[int, dict[str, Any]]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise StoreError(f"{path}:{number}: damaged ({error}); restore the file, or store it anew") from error
    if not isinstance(record, dict):
        raise StoreError(f"{path}:{number}: damaged (not a mapping); restore the file, or store it anew")
    return number, record


def _numbers(values: Iterable[float | None]) -> list[float | int | None]:
    """Six significant digits: a hundredth of what the best timer resolves, and short enough to read."""
    return [
        None if v is None or not math.isfinite(v) else v if isinstance(v, int) else float(f"{v:.6g}") for v in values
    ]
