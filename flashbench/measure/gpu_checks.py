"""What a GPU's settings and its state cost a measurement. Every cost names its source; see `doctor`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from flashbench.measure.findings import Finding
from flashbench.measure.gpu_facts import GpuFacts


def _persistence(g: GpuFacts) -> Iterator[Finding]:
    if g.persistence is False:
        yield Finding(
            "warning",
            f"{g.name}: persistence mode is off",
            "the driver unloads between processes and clocks start cold: 210 instead of 3150 MHz, and two groups of times, "
            "415 and 866 us for one kernel (cubek #423, a desktop card)",
            f"sudo nvidia-smi -i {g.uuid} -pm 1",
        )
    elif g.persistence:
        yield Finding("ok", f"{g.name}: persistence mode is on")


def _processes(g: GpuFacts) -> Iterator[Finding]:
    if g.other_processes:
        yield Finding(
            "warning",
            f"{g.name}: {g.other_processes} other process(es) on the GPU",
            "about 13 % between runs on a shared GPU, where a gate at 10 % failed at random (paiml/aprender #2009)",
            f"nvidia-smi -i {g.uuid}  # and end what is not needed",
        )
    elif g.other_processes == 0:
        yield Finding("ok", f"{g.name}: no other process on the GPU")


def _power(g: GpuFacts) -> Iterator[Finding]:
    limit = g.power_limit_w
    best = max((w for w in (g.default_power_limit_w, g.max_power_limit_w) if w is not None), default=None)
    if limit is None or best is None:
        return
    if limit >= best:
        yield Finding("ok", f"{g.name}: power limit {limit:.0f} W, which is the highest")
        return
    lowered = g.default_power_limit_w is not None and limit < g.default_power_limit_w
    yield Finding(
        "warning" if lowered else "info",
        f"{g.name}: power limit {limit:.0f} W, {'the default' if lowered else 'the highest'} is "
        f"{g.default_power_limit_w if lowered else best:.0f} W",
        "a lower limit is reached sooner, and then the clock falls: 2k causal took 273 us isolated and 303 us sustained "
        "(+11 %) on an H200 at its 700 W (measured); 1965 to 1580 MHz and -15 % in 100 calls on a B200 (flashinfer #2899)",
        f"sudo nvidia-smi -i {g.uuid} -pl {g.default_power_limit_w if lowered else best:.0f}",
    )


def _clocks(g: GpuFacts) -> Iterator[Finding]:
    now, top = g.application_clock_mhz, g.max_sm_clock_mhz
    if now is None or top is None:
        return
    lowered = g.default_application_clock_mhz is not None and now < g.default_application_clock_mhz
    if now < top and (lowered or g.held_by_application_clocks):
        yield Finding(
            "warning",
            f"{g.name}: application clocks hold the SMs at {now} of {top} MHz",
            f"up to {top / now - 1:.0%} longer where compute or L2 hold the time (the clocks' ratio); less variation in exchange",
            f"sudo nvidia-smi -i {g.uuid} -rac",
        )
    elif now < top:
        yield Finding("info", f"{g.name}: application clocks are at their default, {now} of {top} MHz", None, None)
    else:
        yield Finding("ok", f"{g.name}: application clocks allow {top} MHz")


def _throttling(g: GpuFacts) -> Iterator[Finding]:
    if g.throttle_reasons:
        hot = any("thermal" in reason for reason in g.throttle_reasons)
        cost = (
            "1813 MHz at 64 C instead of 1965 MHz at 27 C (tensara #226)"
            if hot
            else "1965 to 1580 MHz and -15 % TFLOP/s within 100 calls on a B200 (flashinfer #2899)"
        )
        yield Finding(
            "warning",
            f"{g.name}: clocks are lowered now ({', '.join(g.throttle_reasons)})",
            cost,
            f"nvidia-smi -i {g.uuid} -q -d PERFORMANCE,TEMPERATURE,POWER",
        )
    elif g.throttle_reasons is not None:
        yield Finding("ok", f"{g.name}: nothing lowers the clocks now")


def _ecc(g: GpuFacts) -> Iterator[Finding]:
    if g.ecc:
        cost = "none on HBM, which has storage for it; a share of memory and bandwidth on GDDR (Pascal tuning guide, NVIDIA)"
        yield Finding("info", f"{g.name}: ECC is on", cost)
    elif g.ecc is False:
        yield Finding("info", f"{g.name}: ECC is off", "compare only with cards that have it off, too")


def _mig(g: GpuFacts) -> Iterator[Finding]:
    if g.mig:
        yield Finding(
            "warning",
            f"{g.name}: MIG is on",
            "an instance has a share of SMs, L2 and bandwidth, so data-sheet ceilings do not hold; use and power cannot be "
            "read (nvitop #5)",
            f"sudo nvidia-smi -i {g.uuid} -mig 0",
        )


GPU_CHECKS: tuple[Callable[[GpuFacts], Iterable[Finding]], ...] = (
    _persistence,
    _processes,
    _power,
    _clocks,
    _throttling,
    _mig,
    _ecc,
)
