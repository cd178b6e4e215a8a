"""SIGTERM ends a sweep as Ctrl-C does: the worker is stopped, finished rows stay, the exit code is 130."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def stop_on_signals() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt for the length of the block."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
