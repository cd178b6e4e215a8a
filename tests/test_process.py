"""The worker process as the parent sees it."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from flashbench.errors import FlashbenchError
from flashbench.records import Device
from flashbench.run.process import OWN, Launch, WorkerProcess
from flashbench.run.spare import Spare

CPU = Device("cpu", "this processor", 1 << 34)


def test_a_worker_that_cannot_start_is_one_clear_error_with_its_last_words(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('no torch in this environment')\n")
    broken.chmod(0o755)
    with pytest.raises(
        FlashbenchError, match=r"no worker could be started on this processor: .*no torch in this environment"
    ):
        WorkerProcess(Launch(python=str(broken))).start(CPU, {})


GPU = Device("cuda", "some GPU", 1 << 34, index=0)
SETTINGS: dict[str, object] = {"rule": {}}


def test_a_spare_worker_waits_for_its_round_and_is_then_the_one_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda: 16)
    with Spare() as spare:
        spare.prepare(GPU, OWN)
        (waiting,) = psutil.Process().children()
        worker = spare.take(CPU, SETTINGS, OWN)
        try:
            assert [child.pid for child in psutil.Process().children()] == [waiting.pid]
        finally:
            worker.stop()


def test_a_spare_worker_that_nobody_took_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda: 16)
    with Spare() as spare:
        spare.prepare(GPU, OWN)
    assert psutil.Process().children() == []


@pytest.mark.parametrize(("device", "cores"), [(CPU, 16), (GPU, 2)], ids=["on a CPU", "without cores to spare"])
def test_no_spare_worker_where_it_would_disturb(device: Device, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda: cores)
    with Spare() as spare:
        spare.prepare(device, OWN)
        assert psutil.Process().children() == []
