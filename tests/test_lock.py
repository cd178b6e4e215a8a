"""One sweep per GPU at a time, by the GPU's UUID."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from flashbench.errors import UsageError
from flashbench.records import Device
from flashbench.run.lock import device_lock


@pytest.fixture(autouse=True)
def _locks_in_a_folder_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def gpu(uuid: str) -> Device:
    return Device("cuda", "NVIDIA H200", 1 << 37, uuid=uuid)


def test_the_second_sweep_on_a_gpu_is_told_who_holds_it() -> None:
    with (
        device_lock(gpu("GPU-1")),
        pytest.raises(UsageError, match=rf"GPU-1.*process {os.getpid()}"),
        device_lock(gpu("GPU-1")),
    ):
        pass


def test_two_gpus_are_measured_side_by_side() -> None:
    with device_lock(gpu("GPU-1")), device_lock(gpu("GPU-2")):
        pass


def test_a_gpu_is_free_again_when_its_sweep_has_ended() -> None:
    for _ in range(2):
        with device_lock(gpu("GPU-1")):
            pass


def test_a_cpu_is_not_locked(tmp_path: Path) -> None:
    cpu = Device("cpu", "processor", 1 << 34)
    with device_lock(cpu), device_lock(cpu):
        assert list(tmp_path.iterdir()) == []
