"""One writer per run: an advisory lock that the system releases when its holder dies."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from flashbench.errors import UsageError

LOCK = "run.lock"


def take_lock(path: Path) -> tuple[int, tuple[str, ...]]:
    """Take the lock of the run's folder `path`: its descriptor (closing it gives it back), and a note where the file system has no locks.

    Raises UsageError with the holder's process id when another writer has it, OSError when the folder cannot be written.
    """
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    notes: tuple[str, ...] = ()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise UsageError(f"run '{path}' is being written by process {holder}; wait for it, or stop it first") from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            os.close(descriptor)
            raise
        notes = ("this file system has no locks: keep other processes from writing to this run",)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor, notes
