"""Ceilings measured on the device: what copying, reading, writing, matrix products and exponentials reach in practice.

Each is timed as the cases are, isolated and sustained, because a power-capped card does not hold its clock back to back.
Matrix products run on random data through the vendor's library: zeros draw less power and read too high.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from flashbench.analysis.statistics import median
from flashbench.hardware.ceilings import Ceiling
from flashbench.measure.memory import release
from flashbench.measure.sampling import Rule
from flashbench.measure.telemetry import Nvml, Watch
from flashbench.measure.timer import time_call
from flashbench.measure.workload import TORCH_DTYPES, matmul_precision
from flashbench.records import Device

GPU_BUFFER_BYTES = 4 << 30
"""For streams; at least four times any L2."""
CPU_BUFFER_BYTES = 128 << 20
GPU_GEMM = 8192
CPU_GEMM = 1024


@dataclass(frozen=True, slots=True)
class _Probe:
    level: str
    dtype: str | None
    kind: str
    call: Callable[[], object]
    work: float
    """Bytes, FLOPs or exponentials of one call."""


UNITS = {"hbm": ("GB/s", 1e6), "l2": ("GB/s", 1e6), "compute": ("TFLOP/s", 1e9), "exp": ("Texp/s", 1e9)}
"""Unit of each level, and what work per millisecond is divided by to get it."""


def measure_ceilings(device: Device, nvml: Nvml, announce: Callable[[str], None]) -> list[Ceiling]:
    """Every ceiling that this device has; a dtype without a matrix product here is left out."""
    seconds = 0.3 if device.kind == "cuda" else 0.4
    regimes = ("isolated", "sustained") if device.kind == "cuda" else ("isolated",)
    found = []
    for probe in _probes(device):
        for regime in regimes:
            announce(f"ceiling {probe.kind}{' ' + probe.dtype if probe.dtype else ''} {regime}")
            rule = Rule(
                "warm", regime, min_samples=10, confidence_width=0.005, max_seconds=seconds, warmup_seconds=seconds
            )
            watch = Watch(nvml)
            with matmul_precision(probe.dtype or "fp32"):
                samples = time_call(probe.call, rule, device, watch.observe)
            time_ms = median(samples.values_ms)
            if not time_ms:
                continue
            unit, divisor = UNITS[probe.level]
            state = watch.state()
            clocks = state.sm_clock_mhz if state else None
            found.append(
                Ceiling(
                    level=probe.level,  # type: ignore[arg-type]
                    dtype=probe.dtype,
                    kind=probe.kind,
                    value=round(probe.work / time_ms / divisor, 6),
                    unit=unit,  # type: ignore[arg-type]
                    source="measured",
                    regime=regime,  # type: ignore[arg-type]
                    sm_clock_mhz=sum(clocks) / 2 if clocks else None,
                    power_w=state.power_w if state else None,
                )
            )
    release()
    return found


def _probes(device: Device) -> Iterator[_Probe]:
    yield from _streams(device)
    release()
    yield from _products(device)
    release()
    if device.kind == "cuda":
        yield from _units(device)


def _streams(device: Device) -> Iterator[_Probe]:
    where = torch.device(device.kind, device.index)
    if device.kind == "cuda":
        size = max(4 * (device.l2_bytes or 0), min(GPU_BUFFER_BYTES, device.memory_bytes // 8))
    else:
        size = min(max(4 * (device.l2_bytes or 0), CPU_BUFFER_BYTES), device.memory_bytes // 8, 8 * CPU_BUFFER_BYTES)
    count = size // 4
    source = torch.randn(count, device=where)
    target = torch.empty_like(source)
    yield _Probe("hbm", None, "copy", lambda: target.copy_(source), 2.0 * 4 * count)
    yield _Probe("hbm", None, "read", source.sum, 4.0 * count)
    yield _Probe("hbm", None, "write", lambda: target.fill_(1.0), 4.0 * count)


def _products(device: Device) -> Iterator[_Probe]:
    where = torch.device(device.kind, device.index)
    size = GPU_GEMM if device.kind == "cuda" else CPU_GEMM
    for dtype, torch_dtype in TORCH_DTYPES.items():
        if device.kind == "cpu" and dtype != "fp32":
            continue  # other dtypes are emulated on most CPUs, and would be no ceiling
        if device.capability is not None and device.capability < (8, 0) and dtype in ("bf16", "tf32"):
            continue
        a, b = (torch.randn(size, size, device=where).to(torch_dtype) for _ in range(2))
        yield _Probe("compute", dtype, "gemm", lambda a=a, b=b: a @ b, 2.0 * size**3)  # type: ignore[misc]
    if device.capability is not None and device.capability >= (8, 9):
        yield from _fp8_product(where, size)


def _fp8_product(where: torch.device, size: int) -> Iterator[_Probe]:
    a, b = (torch.randn(size, size, device=where).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=where)

    def product() -> object:
        return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    yield _Probe("compute", "fp8", "gemm", product, 2.0 * size**3)


def _units(device: Device) -> Iterator[_Probe]:
    """L2 bandwidth and the exponential unit, through small Triton kernels (kernels/ceilings.py)."""
    from flashbench.kernels.ceilings import exponentials, read_repeatedly

    where = torch.device(device.kind, device.index)
    if device.l2_bytes:
        # A third of the L2: on a GPU whose L2 has two halves, more than a half of it would cross between them.
        resident = torch.randn(device.l2_bytes // 3 // 4, device=where)
        passes = 20
        yield _Probe("l2", None, "read", lambda: read_repeatedly(resident, passes), 4.0 * resident.numel() * passes)
    sms = device.sm_count or 1
    yield _Probe("exp", None, "exp", lambda: exponentials(where, sms), float(exponentials(where, sms, count_only=True)))
