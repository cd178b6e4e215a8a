"""NVML on a real GPU: the readings belong to the GPU that torch uses, and the doctor sees the same one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from flashbench.measure.device import describe
from flashbench.measure.doctor import examine
from flashbench.measure.machine import look
from flashbench.measure.telemetry import Nvml, Watch
from flashbench.records import Device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none"),
]


@pytest.fixture(scope="module")
def device() -> Device:
    found = describe("auto")
    nvml = Nvml.open(found.uuid)
    nvml.close()
    if nvml.problem:
        pytest.skip(nvml.problem)
    return found


def test_a_gpu_at_work_has_a_clock_within_its_limits(device: Device) -> None:
    watch = Watch(Nvml.open(device.uuid))
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    began = time.monotonic()
    while time.monotonic() - began < 0.5:
        for _ in range(20):
            x @ x
        watch.observe()
        torch.cuda.synchronize()
    state = watch.state()
    watch.nvml.close()
    assert state is not None
    if state.sm_clock_mhz is not None and device.max_sm_clock_mhz is not None:
        low, high = state.sm_clock_mhz
        assert 0 < low <= high <= device.max_sm_clock_mhz
    assert state.power_w is None or state.power_w > 0
    assert state.temperature_c is None or 0 < state.temperature_c < 120


def test_the_doctor_sees_the_gpu_that_torch_uses(device: Device) -> None:
    machine = look(Path("results"))
    assert device.uuid in [gpu.uuid for gpu in machine.gpus]
    assert machine.driver == device.versions["driver"]
    assert examine(machine)


def test_the_doctors_reading_of_torchs_cuda_is_torchs_own(device: Device) -> None:
    assert torch.version.cuda is not None
    assert look(Path("results")).torch_cuda == tuple(int(part) for part in torch.version.cuda.split(".")[:2])
