"""A worker process as the parent sees it: messages out, messages in with a deadline, and what it last said on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from flashbench.errors import FlashbenchError
from flashbench.records import Device, to_plain

START_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Launch:
    """Where a worker comes from. The two sides of `ab` differ in this; everything else uses the parent's own."""

    python: str = sys.executable
    path: tuple[str, ...] = ()
    """Folders in front of PYTHONPATH."""
    folder: Path | None = None
    """Working folder, from which the files of providers are found; None: the parent's."""

    @property
    def environment(self) -> dict[str, str]:
        given = os.environ.get("PYTHONPATH")
        paths = [*self.path, *([given] if given else [])]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)} if paths else dict(os.environ)

    def command(self, *arguments: str) -> list[str]:
        return [self.python, "-m", "flashbench.run.worker", *arguments]


OWN = Launch()


class WorkerGone(Exception):
    """The process ended without an answer; the message says how, with its last words."""


class WorkerSilent(Exception):
    """No answer before the deadline."""


class WorkerProcess:
    """A fresh worker, which imports what it needs and then waits. It leads a process group of its own, so that Ctrl-C reaches the parent alone."""

    def __init__(self, launch: Launch = OWN) -> None:
        self.launch = launch
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `stop`
        self._process = subprocess.Popen(
            launch.command(),
            cwd=launch.folder,
            env=launch.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        self._pending = b""

    def start(self, device: Device, settings: dict[str, Any]) -> Self:
        """Give it its device. FlashbenchError when it cannot serve: the device is gone, or its interpreter has no torch."""
        try:
            self.send({"type": "start", "device": to_plain(device), "settings": settings})
            self.receive(START_SECONDS)
        except WorkerGone as how:
            self.stop()
            raise FlashbenchError(f"no worker could be started on {device.name}: {how}") from None
        except WorkerSilent:
            self.stop()
            raise FlashbenchError(f"a worker on {device.name} did not start within {START_SECONDS:.0f} s") from None
        except BaseException:
            self.stop()
            raise
        return self

    def send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerGone(self._last_words()) from None

    def receive(self, seconds: float) -> dict[str, Any]:
        """The next message. WorkerSilent after `seconds`, WorkerGone when the process has ended."""
        deadline = time.monotonic() + seconds
        assert self._process.stdout is not None
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0 or not self._selector.select(left):
                raise WorkerSilent
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise WorkerGone(self._last_words())
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def stop(self) -> None:
        """End the process, with everything that it started."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._selector.close()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                with contextlib.suppress(OSError):  # what was still buffered has no reader any more
                    stream.close()

    def last_stderr(self, lines: int = 6) -> str:
        """The last lines of its stderr, joined."""
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - 4096))
        text = self._stderr.read().decode(errors="replace")
        kept = [line.strip() for line in text.splitlines() if line.strip()]
        return " | ".join(kept[-lines:])

    def _last_words(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            code = None
        if code is None:
            how = "closed its output"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"exited with code {code}"
        words = self.last_stderr()
        return f"the worker {how}" + (f"; its last words: {words}" if words else "")
