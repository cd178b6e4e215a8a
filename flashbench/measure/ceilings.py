"""Ceilings measured on the device: what copying, reading, writing, matrix products and exponentials reach in practice.

Each is timed as the cases are, isolated and sustained, because a power-capped card does not hold its clock back to back. A
sustained figure is taken at the card's equilibrium: coming from idle, the power limit first cuts the clock too far, and gives it back
over a second or more. Matrix products run on random data through the vendor's library: zeros draw less power and read too high.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

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
L2_PASSES = 20

SHORT_SECONDS = {"cuda": 0.3, "cpu": 0.4}
"""Shortest warm-up, and the budget, of an isolated figure."""
SETTLE_SECONDS = 1.5
"""Shortest warm-up of a sustained one. It ends when the medians of two thirds of this, one second together, agree within 1 %."""
SUSTAINED_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _Probe:
    level: str
    dtype: str | None
    kind: str
    call: Callable[[], object]
    work: float
    """Bytes, FLOPs or exponentials of one call."""
    regimes: tuple[str, ...] = ("isolated", "sustained")


UNITS = {"hbm": ("GB/s", 1e6), "l2": ("GB/s", 1e6), "compute": ("TFLOP/s", 1e9), "exp": ("Texp/s", 1e9)}
"""Unit of each level, and what work per millisecond is divided by to get it."""


def measure_ceilings(device: Device, nvml: Nvml, announce: Callable[[str], None]) -> list[Ceiling]:
    """Every ceiling that this device has; a dtype without a matrix product here is left out. Under a minute on a GPU."""
    found = []
    for make in _groups(device):
        # The probes of a group hold its buffers; both go before the next group makes its own.
        for probe in make(device):
            for regime in probe.regimes if device.kind == "cuda" else ("isolated",):
                announce(f"ceiling {probe.kind}{' ' + probe.dtype if probe.dtype else ''} {regime}")
                ceiling = _measure(probe, regime, device, nvml)
                if ceiling is not None:
                    found.append(ceiling)
            del probe
        release()
    return found


def _measure(probe: _Probe, regime: str, device: Device, nvml: Nvml) -> Ceiling | None:
    short = SHORT_SECONDS[device.kind]
    rule = Rule("warm", regime, min_samples=10, confidence_width=0.005, max_seconds=short, warmup_seconds=short)
    watch = Watch(nvml)
    with matmul_precision(probe.dtype or "fp32"):
        if regime == "sustained":
            settle = Rule("warm", regime, min_samples=1, max_seconds=0, warmup_seconds=SETTLE_SECONDS)
            time_call(probe.call, settle, device)
            # Clock and power are read from here on only; no interval is narrow enough to end the sampling early.
            rule = Rule(
                "warm", regime, min_samples=10, confidence_width=0, max_seconds=SUSTAINED_SECONDS, warmup_seconds=0
            )
        samples = time_call(probe.call, rule, device, watch.observe)
    time_ms = median(samples.values_ms)
    if not time_ms:
        return None
    state = watch.state()
    unit, divisor = UNITS.get(probe.level, ("us", 0))
    return Ceiling(
        level=probe.level,  # type: ignore[arg-type]
        dtype=probe.dtype,
        kind=probe.kind,
        value=round(probe.work / time_ms / divisor if divisor else time_ms * 1e3, 6),
        unit=unit,  # type: ignore[arg-type]
        source="measured",
        regime=regime,  # type: ignore[arg-type]
        sm_clock_mhz=round(sum(watch.sm_clocks) / len(watch.sm_clocks)) if watch.sm_clocks else None,
        power_w=state.power_w if state else None,
    )


Group = Callable[[Device], Iterator[_Probe]]


def _groups(device: Device) -> Sequence[Group]:
    dtypes = [dtype for dtype in TORCH_DTYPES if _multiplies(device, dtype)]
    found: list[Group] = [_streams, *(partial(_product, dtype=dtype) for dtype in dtypes)]
    if device.kind == "cuda":
        found += [*([_fp8_product] if _multiplies(device, "fp8") else []), _l2, _exponentials, _launch]
    return found


def _multiplies(device: Device, dtype: str) -> bool:
    """Whether the device has units for products of a dtype; on most CPUs all but fp32 are emulated, and would be no ceiling."""
    if device.kind == "cpu":
        return dtype == "fp32"
    needed = {"bf16": (8, 0), "tf32": (8, 0), "fp8": (8, 9)}.get(dtype, (0, 0))
    return device.capability is None or device.capability >= needed


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


def _product(device: Device, dtype: str) -> Iterator[_Probe]:
    size = GPU_GEMM if device.kind == "cuda" else CPU_GEMM
    where = torch.device(device.kind, device.index)
    a, b = (torch.randn(size, size, device=where).to(TORCH_DTYPES[dtype]) for _ in range(2))
    yield _Probe("compute", dtype, "gemm", lambda: a @ b, 2.0 * size**3)


def _fp8_product(device: Device) -> Iterator[_Probe]:
    where, size = torch.device(device.kind, device.index), GPU_GEMM
    a, b = (torch.randn(size, size, device=where).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=where)

    def product() -> object:
        return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    yield _Probe("compute", "fp8", "gemm", product, 2.0 * size**3)


def _l2(device: Device) -> Iterator[_Probe]:
    from flashbench.kernels.ceilings import bytes_read_repeatedly, read_repeatedly

    if not device.l2_bytes or not device.sm_count:
        return
    # A third of the L2: on a GPU whose L2 has two halves, more than a half of it would cross between them.
    resident = torch.randn(device.l2_bytes // 3 // 4, device=torch.device(device.kind, device.index))
    work = bytes_read_repeatedly(resident.numel(), L2_PASSES, device.sm_count)
    sms = device.sm_count
    yield _Probe("l2", None, "read", lambda: read_repeatedly(resident, L2_PASSES, sms), float(work))


def _exponentials(device: Device) -> Iterator[_Probe]:
    from flashbench.kernels.ceilings import exponentials

    where, sms = torch.device(device.kind, device.index), device.sm_count or 1
    yield _Probe("exp", None, "exp", lambda: exponentials(where, sms), float(exponentials(where, sms, count_only=True)))


def _launch(device: Device) -> Iterator[_Probe]:
    """A kernel without work: what the shortest of calls takes, timed as they are."""
    from flashbench.kernels.ceilings import nothing

    where = torch.device(device.kind, device.index)
    yield _Probe("launch", None, "empty", lambda: nothing(where), 0.0, regimes=("isolated",))
