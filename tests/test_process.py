"""The worker process as the parent sees it."""

from __future__ import annotations

import sys
import time
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


def _children() -> list[int]:
    """Workers of this process; it may have other children. A process that was born just now has no command line for a moment."""
    for _ in range(100):
        commands = {child.pid: child.cmdline() for child in psutil.Process().children()}
        if all(commands.values()):
            break
        time.sleep(0.02)
    return [pid for pid, command in commands.items() if "flashbench.run.worker" in command]


SETTINGS: dict[str, object] = {"rule": {}}


def test_a_spare_worker_waits_for_its_round_and_is_then_the_one_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda: 16)
    with Spare() as spare:
        spare.prepare(GPU, OWN)
        waiting = _children()
        worker = spare.take(CPU, SETTINGS, OWN)
        try:
            assert len(waiting) >= 1
            assert _children() == waiting
        finally:
            worker.stop()


OTHER = Launch(path=("/another/revision",))


@pytest.mark.parametrize(("cores", "waiting"), [(4, 1), (8, 2), (16, 3), (128, 3)])
def test_as_many_workers_wait_as_cores_allow_and_at_most_three(
    cores: int, waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda: cores)
    with Spare() as spare:
        spare.prepare(GPU, *[OWN] * 10)
        assert len(_children()) == waiting


def test_fewer_rounds_to_come_than_workers_may_wait_start_no_more_than_they_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda: 16)
    with Spare() as spare:
        spare.prepare(GPU, OWN)
        assert len(_children()) == 1
        spare.prepare(GPU)
        assert _children() == []


def test_workers_that_wait_are_kept_for_the_rounds_that_follow_and_only_what_is_missing_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda: 16)
    with Spare() as spare:
        spare.prepare(GPU, OWN, OTHER, OTHER)
        before = _children()
        spare.prepare(GPU, OTHER, OTHER, OWN)
        assert _children() == before
        spare.prepare(GPU, OTHER, OWN, OWN)
        assert len(set(_children()) & set(before)) == 2
        assert len(_children()) == 3


def test_each_side_takes_a_worker_of_its_own_launch_and_the_one_that_waited_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda: 16)
    with Spare() as spare:
        spare.prepare(GPU, OTHER)
        (other,) = _children()
        spare.prepare(GPU, OTHER, OWN)
        (first,) = set(_children()) - {other}
        spare.prepare(GPU, OTHER, OWN, OWN)
        (second,) = set(_children()) - {other, first}
        worker = spare.take(CPU, SETTINGS, OWN)
        worker.stop()
        assert sorted(_children()) == sorted([other, second])


def test_a_spare_worker_that_nobody_took_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda: 16)
    with Spare() as spare:
        spare.prepare(GPU, OWN)
    assert _children() == []


@pytest.mark.parametrize(("device", "cores"), [(CPU, 16), (GPU, 2)], ids=["on a CPU", "without cores to spare"])
def test_no_spare_worker_where_it_would_disturb(device: Device, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda: cores)
    with Spare() as spare:
        spare.prepare(device, OWN)
        assert _children() == []
