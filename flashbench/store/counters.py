"""Hardware counters of single cases, as Nsight Compute read them: one file, a header line and a line a case."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashbench.errors import FlashbenchError, StoreError
from flashbench.records import Case, from_plain, to_plain

SCHEMA = 1
FILE = "counters.jsonl"


@dataclass(frozen=True, slots=True)
class Counted:
    """What the counters said of one call of a case, all its kernels together. A counter that could not be read is None."""

    case: Case
    status: str
    """ok, unsupported, oom or error."""
    reason: str | None = None
    dram_read_bytes: float | None = None
    dram_write_bytes: float | None = None
    """What reached HBM during the call: dirty lines that the L2 still held at its end are not in it."""
    l2_bytes: float | None = None
    time_ms: float | None = None
    """Under the profiler, so never to be compared with a timed row."""
    tensor_instructions: Mapping[str, float] | None = None
    """Warp instructions of the tensor pipe by the counter's name; a warp-group instruction counts once a warp."""
    launch: dict[str, Any] | None = None
    backend: str | None = None


def create(path: Path, header: Mapping[str, Any]) -> None:
    """A new file with its header: device, command, tool and metrics. StoreError when nothing can be written there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"schema": SCHEMA, **to_plain(dict(header))}, allow_nan=False) + "\n")
    except OSError as error:
        raise StoreError(f"cannot write '{path}' ({error.strerror}); name another folder") from None


def append(path: Path, counted: Counted) -> None:
    """Put one case on the disk."""
    line = json.dumps({"key": counted.case.key, **to_plain(counted)}, allow_nan=False) + "\n"
    with path.open("a", encoding="utf-8") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def load(path: Path) -> tuple[dict[str, Any], tuple[Counted, ...]]:
    """Header and cases of a file, or of the one in a folder. StoreError when it is not there, damaged or of a newer schema."""
    file = path / FILE if path.is_dir() else path
    try:
        first, *lines = file.read_text(encoding="utf-8").splitlines()
        header = dict(json.loads(first))
        schema = int(header["schema"])
        found = tuple(_counted(line) for line in lines) if schema <= SCHEMA else ()
    except FileNotFoundError:
        raise StoreError(f"'{file}' is not there; `flashbench counters CONFIG` writes one") from None
    except (OSError, ValueError, TypeError, KeyError, FlashbenchError) as error:
        raise StoreError(f"'{file}' cannot be read as counters ({type(error).__name__}: {error})") from None
    if schema > SCHEMA:
        raise StoreError(f"'{file}' has schema {schema}, this version reads up to {SCHEMA}; use the newer flashbench")
    return header, found


def _counted(line: str) -> Counted:
    plain = json.loads(line)
    return from_plain(Counted, {**plain, "case": Case.from_key(plain["key"])})
