"""One sweep per GPU at a time: two would measure one another. The lock goes by the GPU's UUID and ends with its holder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from flashbench.errors import UsageError
from flashbench.records import Device


@contextlib.contextmanager
def device_lock(device: Device) -> Iterator[None]:
    """Hold the GPU for the length of the block; UsageError that says who has it. A CPU is not locked."""
    if device.uuid is None:
        yield
        return
    path = Path(tempfile.gettempdir()) / f"flashbench-{device.uuid}.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:
        raise UsageError(f"another user's lock is in the way: '{path}'; ask its owner to remove it") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            raise UsageError(
                f"{device.name} ({device.uuid}) is being measured by process {holder}; wait for it"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
