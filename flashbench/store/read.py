"""Reading a run: its header, rows and samples, with what is damaged said in words. Needs the standard library only."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashbench import __version__
from flashbench.errors import FlashbenchError, StoreError, UsageError, nearest
from flashbench.records import Check, Memory, Row, State, Timing, from_plain

SCHEMA_VERSION = 1
HEADER = "run.json"
ROWS = "rows.jsonl"
SAMPLES = "samples.f32"

Visit = tuple[str, int]
"""(case key, round)."""


@dataclass(frozen=True)
class Run:
    """What one run's folder holds."""

    path: Path
    header: dict[str, Any]
    """`run.json` as it was written."""
    rows: tuple[Row, ...]
    """In the order of measuring; of a visit that was repeated, the last row."""
    samples_ms: Mapping[Visit, array[float]]
    """Samples by visit, in ms; no entry for a row that has none, or whose samples are lost."""
    lost: frozenset[Visit] = frozenset()
    """Visits whose row names samples that are not in the file."""
    notes: tuple[str, ...] = ()
    """What is damaged, for a person to read."""
    rows_end: int = 0
    """Bytes of `rows.jsonl` up to half a last line."""
    samples_end: int = 0
    """Samples that the rows account for."""

    @property
    def device_id(self) -> str:
        return str(self.header.get("device_id") or self.path.parent.name)


def find_run(path: Path | str) -> Path:
    """The run's folder that `path` means: itself, the folder of a file inside one, or the newest run below.

    Raises UsageError when there is nothing at the path, StoreError when what is there holds no run.
    """
    path = Path(path)
    if path.is_file() and (path.parent / HEADER).is_file():
        return path.parent
    if (path / HEADER).is_file():
        return path
    if not path.exists():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UsageError(f"no run at '{path}': there is no such folder{nearest(path.name, siblings)}")
    runs = [header.parent for header in path.rglob(HEADER)]
    if not runs:
        raise StoreError(
            f"no run in '{path}' (a run is a folder with {HEADER}); measure one first, or name another folder"
        )
    return max(runs, key=lambda run: (_has_rows(run), _started(run), run.name))


def _has_rows(run: Path) -> bool:
    """A run that died before its first row is not what "the newest" means, unless there is no other."""
    rows = run / ROWS
    return rows.is_file() and rows.stat().st_size > 0


def load_rows(path: Path | str, *, strict: bool = False) -> list[Row]:
    """The rows of the run at `path`, see `load_run`."""
    return list(load_run(path, strict=strict).rows)


def load_run(path: Path | str, *, strict: bool = False) -> Run:
    """Read the run that `path` means (see `find_run`).

    Half a last line is what a kill leaves; it is left out with a note. Any other damage is left out with a note too, or, when
    `strict`, raises StoreError with file and line. An unusable header and a newer schema always raise StoreError.
    """
    folder = find_run(path)
    header = _header(folder / HEADER)
    file = folder / ROWS
    content = file.read_bytes() if file.exists() else b""
    samples = _samples(folder / SAMPLES)
    rows: dict[Visit, Row] = {}
    spans: dict[Visit, tuple[int, int]] = {}
    finished: set[Visit] = set()
    notes: list[str] = []
    rows_end = samples_end = position = 0

    def damage(number: int, what: str) -> None:
        if strict:
            raise StoreError(f"{file}:{number}: {what}; read it without this line, or measure the run again")
        notes.append(f"{ROWS}:{number}: {what}")

    for number, line in enumerate(io.BytesIO(content), start=1):
        position += len(line)
        try:
            row, span = _parse(line)
        except (ValueError, TypeError, KeyError, AttributeError, FlashbenchError) as error:
            if line.endswith(b"\n"):
                rows_end = position
                damage(number, f"damaged line left out ({_words(error)})")
            else:
                notes.append(f"{ROWS}:{number}: half a line at the end left out; the process that wrote it was stopped")
            continue
        rows_end = position
        visit = (row.key, row.round)
        if visit in finished:
            damage(number, f"a second row of '{row.key}' in round {row.round}; the last one counts")
        rows.pop(visit, None)  # a repeated visit takes its later place
        rows[visit], spans[visit] = row, span
        samples_end = max(samples_end, sum(span))
        finished.discard(visit)
        if row.status not in ("crashed", "timeout") and _slice(samples, span) is not None:
            finished.add(visit)

    found = {visit: _slice(samples, spans[visit]) for visit in rows}
    lost = frozenset(visit for visit, values in found.items() if values is None)
    notes += [f"{SAMPLES}: the samples of '{key}' in round {number} are lost" for key, number in sorted(lost)]
    return Run(
        path=folder,
        header=header,
        rows=tuple(rows.values()),
        samples_ms={visit: values for visit, values in found.items() if values},
        lost=lost,
        notes=tuple(notes),
        rows_end=rows_end,
        samples_end=samples_end,
    )


def done(run: Run) -> set[Visit]:
    """The visits that need no repeating: all but those that crashed, timed out, or lost their samples."""
    return {(row.key, row.round) for row in run.rows if row.status not in ("crashed", "timeout")} - run.lost


def _header(path: Path) -> dict[str, Any]:
    try:
        header = json.loads(path.read_bytes())
        version = header["schema_version"]
        newer = version > SCHEMA_VERSION
    except OSError as error:
        raise StoreError(f"cannot read '{path}' ({error.strerror})") from error
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(f"'{path}' is not the header of a run ({_words(error)}); the run cannot be used") from error
    if newer:
        raise StoreError(
            f"'{path}' has schema {version}, flashbench {__version__} reads up to {SCHEMA_VERSION}; use the newer flashbench that wrote it"
        )
    return dict(header)


def _parse(line: bytes) -> tuple[Row, tuple[int, int]]:
    """A row and the (offset, count) of its samples; fields that an older schema did not have are None."""
    plain = json.loads(line)
    for name, cls in (("check", Check), ("timing", Timing), ("memory", Memory), ("state", State)):
        if isinstance(plain.get(name), dict):
            plain[name] = {f.name: None for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING} | plain[
                name
            ]
    span = plain.pop("samples", None) or {"offset": 0, "count": 0}
    row = from_plain(Row, plain)
    if type(row.round) is not int or not isinstance(row.status, str):
        raise ValueError("round or status is missing")
    return row, (int(span["offset"]), int(span["count"]))


def _samples(path: Path) -> array[float]:
    content = path.read_bytes() if path.exists() else b""
    samples = array("f")
    samples.frombytes(content[: len(content) // samples.itemsize * samples.itemsize])
    if sys.byteorder == "big":
        samples.byteswap()
    return samples


def _slice(samples: array[float], span: tuple[int, int]) -> array[float] | None:
    """The samples of a span, or None when the file does not hold them (lost samples were filled with NaN on resuming)."""
    offset, count = span
    values = samples[offset : offset + count]
    return values if len(values) == count and all(value == value for value in values) else None


def _started(run: Path) -> str:
    """When a run started, as text that sorts: from its header, or from the folder's name where the header is damaged."""
    try:
        started = str(json.loads((run / HEADER).read_bytes())["started"])
    except (OSError, ValueError, TypeError, KeyError):
        started = run.name
    return started.replace("-", "").replace(":", "")


def _words(error: Exception) -> str:
    return f"no field {error}" if isinstance(error, KeyError) else str(error)
