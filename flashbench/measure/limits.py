"""Beyond a physical limit: no clock and no cache could explain the time, so the row is invalid.

The limits are SMs x rate x *maximum* clock, and the data sheet's bandwidth for the bytes that the L2 cannot have held. A row
above a *measured* ceiling is another matter: the ceiling wants measuring again.
"""

from __future__ import annotations

from flashbench.analysis.statistics import median
from flashbench.hardware import catalogue
from flashbench.model.flops import PRODUCTS, useful_flops
from flashbench.model.tensors import compulsory_bytes
from flashbench.model.traffic import traffic
from flashbench.records import Case, Device


def beyond_physics(case: Case, samples_ms: list[float], device: Device, algorithm: str | None = None) -> str | None:
    """A sentence that says which limit the median breaks, or None; None too where the device's limits are not known."""
    time_ms = median(samples_ms)
    if time_ms is None or time_ms <= 0:
        return "no time could be read: the median is zero"
    spec = catalogue.match(device)
    if spec is None:
        return None
    tflops = useful_flops(case.problem, algorithm) / time_ms / 1e9
    limit = spec.limit_tflops(case.problem.dtype, device.max_sm_clock_mhz)
    if limit is not None and tflops > limit:
        return f"{tflops:.0f} TFLOP/s is more than {limit:.0f} TFLOP/s, which is every SM at its highest clock"
    compulsory = compulsory_bytes(case.problem)
    if algorithm is not None and algorithm in PRODUCTS:
        compulsory = traffic(algorithm, case.problem).low
    from_memory = compulsory - (device.l2_bytes or 0)
    gbps = from_memory / time_ms / 1e6
    if gbps > spec.hbm_gbps:
        return f"{gbps:.0f} GB/s of compulsory traffic is more than the data sheet's {spec.hbm_gbps:.0f} GB/s"
    return None
