"""The worker process as the parent sees it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flashbench.errors import FlashbenchError
from flashbench.records import Device
from flashbench.run.process import Launch, WorkerProcess

CPU = Device("cpu", "this processor", 1 << 34)


def test_a_worker_that_cannot_start_is_one_clear_error_with_its_last_words(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('no torch in this environment')\n")
    broken.chmod(0o755)
    with pytest.raises(
        FlashbenchError, match=r"no worker could be started on this processor: .*no torch in this environment"
    ):
        WorkerProcess(CPU, {}, Launch(python=str(broken)))
