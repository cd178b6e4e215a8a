"""Writing a run: one folder, one writer, and no finished row lost to a kill or a full disk.

    <root>/<device id>/<UTC time>-<name>/run.json       what was planned, where and with what; written once
                                         rows.jsonl     one line per finished visit
                                         samples.f32    the samples of all rows, little-endian float32, ms
                                         run.lock       held by the process that writes

A row's samples reach the disk before the row does, so a row that can be read has its samples; what a kill leaves behind is at most
half a line and samples that no row names.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from array import array
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flashbench import __version__
from flashbench.errors import StoreError, UsageError
from flashbench.records import Row, to_plain
from flashbench.store.lock import take_lock
from flashbench.store.read import HEADER, ROWS, SAMPLES, SCHEMA_VERSION, done, find_run, load_run

SAMPLE_BYTES = 4


class RunWriter:
    """Appends rows to one run's folder. Make one with `create` or `resume`; close it, or use it in a `with` statement."""

    def __init__(self, path: Path, lock: int, finished: set[tuple[str, int]], notes: tuple[str, ...]) -> None:
        self.path = path
        self.notes = notes
        """What `resume` found damaged, in words."""
        self._lock = lock
        self._finished = finished
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._rows = os.open(path / ROWS, flags, 0o644)
        self._samples = os.open(path / SAMPLES, flags, 0o644)

    @classmethod
    def create(cls, root: Path | str, device_id: str, name: str, header: Mapping[str, Any]) -> RunWriter:
        """A new run below `root`; `header` holds command, device, config, cases (the planned keys) and models.

        Raises UsageError when nothing can be written there: before anything has been measured.
        """
        started = datetime.now(UTC)
        stamp = started.strftime("%Y%m%dT%H%M%SZ")
        facts = {
            "schema_version": SCHEMA_VERSION,
            "name": name,
            "started": started.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "flashbench": __version__,
            "device_id": device_id,
            **header,
        }
        text = json.dumps(_finite(to_plain(facts)), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            path = _new_folder(Path(root) / _file_name(device_id), f"{stamp}-{_file_name(name)}")
            lock, notes = take_lock(path)
            _replace(path / HEADER, text)
            writer = cls(path, lock, set(), notes)
            _sync_names(path)
            return writer
        except OSError as error:
            raise UsageError(
                f"cannot write results below '{root}' ({error.strerror}); name another folder with --out"
            ) from error

    @classmethod
    def resume(cls, path: Path | str) -> RunWriter:
        """The run at `path`, or the newest below it, opened for the rows that are missing.

        Half a last line and samples that no row names, which a kill leaves behind, are cut off and told in `notes`.
        Raises UsageError when another process writes to the run, StoreError when its header cannot be used.
        """
        folder = find_run(path)
        try:
            lock, notes = take_lock(folder)
        except OSError as error:
            raise UsageError(f"cannot write to run '{folder}' ({error.strerror})") from error
        try:
            run = load_run(folder)
            _trim(folder, run.rows_end, run.samples_end)
            return cls(folder, lock, done(run), notes + run.notes)
        except OSError as error:
            os.close(lock)
            raise UsageError(f"cannot write to run '{folder}' ({error.strerror})") from error
        except BaseException:
            os.close(lock)
            raise

    def append(self, row: Row, samples_ms: Sequence[float] = ()) -> None:
        """Put one finished visit on the disk; when this returns, a power cut does not lose it.

        A number that is not finite is written as null. Raises StoreError for a (case, round) that is already there, unless
        it had crashed or timed out, and when the disk is full; ValueError for a sample that is not finite.
        """
        visit = (row.key, row.round)
        if visit in self._finished:
            raise StoreError(
                f"'{row.key}' of round {row.round} is already in '{self.path}'; a second row would hide the first one"
            )
        if not all(map(math.isfinite, samples_ms)):
            raise ValueError(f"a sample of '{row.key}' is not finite")
        rows_end, samples_end = os.fstat(self._rows).st_size, os.fstat(self._samples).st_size
        plain = {"key": row.key, **to_plain(row)}
        if samples_ms:
            plain["samples"] = {"offset": samples_end // SAMPLE_BYTES, "count": len(samples_ms)}
        line = json.dumps(_finite(plain), ensure_ascii=False, allow_nan=False) + "\n"
        try:
            if samples_ms:
                _write(self._samples, _float32_bytes(samples_ms))
            _write(self._rows, line.encode())
        except BaseException as error:
            # An interrupt too: what is half written must not stand before the next row.
            os.ftruncate(self._rows, rows_end)
            os.ftruncate(self._samples, samples_end)
            if isinstance(error, OSError):
                raise StoreError(
                    f"cannot write '{row.key}' to '{self.path}' ({error.strerror}); the rows before it are safe: "
                    "make room and go on with --resume"
                ) from error
            raise
        if row.status not in ("crashed", "timeout"):
            self._finished.add(visit)

    def close(self) -> None:
        """Release the run; a second call does nothing."""
        if self._lock >= 0:
            for descriptor in (self._rows, self._samples, self._lock):
                os.close(descriptor)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _file_name(text: str) -> str:
    """`text` as part of a path: no separators, no spaces, no leading dot."""
    name = re.sub(r"[^\w.+-]+", "-", text).strip("-.")
    if not name:
        raise UsageError(f"'{text}' cannot name a folder; use letters, digits, '-', '.' and '_'")
    return name


def _new_folder(parent: Path, name: str) -> Path:
    """A folder that did not exist before; two runs of one second and one name get different ones."""
    parent.mkdir(parents=True, exist_ok=True)
    for count in range(1, 1000):
        path = parent / (name if count == 1 else f"{name}-{count}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue
    raise UsageError(f"a thousand runs are named '{name}' in '{parent}'")


def _trim(folder: Path, rows_end: int, samples_end: int) -> None:
    """Cut both files to what the rows account for, so that the next row starts on its own line and on a whole sample."""
    rows, samples = folder / ROWS, folder / SAMPLES
    with rows.open("ab") as file:
        file.truncate(rows_end)
    if rows_end and rows.read_bytes()[-1:] != b"\n":  # killed between a row and its line end
        with rows.open("ab") as file:
            file.write(b"\n")
    with samples.open("ab") as file:
        missing = samples_end - file.tell() // SAMPLE_BYTES
        file.truncate(min(file.tell() // SAMPLE_BYTES, samples_end) * SAMPLE_BYTES)
        # Samples that a row names but the disk has lost stay lost: later samples must not slide into their place.
        file.write(_float32_bytes([math.nan] * missing))


def _float32_bytes(values: Sequence[float]) -> bytes:
    data = array("f", values)
    if sys.byteorder == "big":
        data.byteswap()
    return data.tobytes()


def _write(descriptor: int, data: bytes) -> None:
    """One write where the system takes it whole, then wait for the disk."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
    os.fsync(descriptor)


def _replace(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or none."""
    draft = path.with_name(path.name + ".part")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _sync_names(folder: Path) -> None:
    """Wait until the names in a folder, and its own, are on the disk: syncing a file does not do that."""
    for path in (folder, folder.parent):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _finite(plain: Any) -> Any:
    """Plain data with null for each number that JSON cannot hold (NaN, infinity)."""
    if isinstance(plain, float):
        return plain if math.isfinite(plain) else None
    if isinstance(plain, dict):
        return {name: _finite(value) for name, value in plain.items()}
    if isinstance(plain, list):
        return [_finite(value) for value in plain]
    return plain
