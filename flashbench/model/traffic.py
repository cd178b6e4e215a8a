"""HBM bytes that an algorithm moves for a problem, as an interval with an estimate inside; and arithmetic intensity.

No constant here is fitted: each comes from the algorithm or the device. What an L2 keeps of the rows that many blocks read is
replayed (model/l2.py). A CPU, whose caches and cores are not described, gets the estimate without an L2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flashbench.errors import UsageError, nearest
from flashbench.model import materialised, tiled
from flashbench.model.interval import Cache, Traffic
from flashbench.model.schedule import Schedule
from flashbench.records import Device, Problem

Count = Callable[[Problem, Cache, Schedule], Traffic]


def _both(forward: Count, backward: Count | None) -> dict[str, Count]:
    counts = {"forward": forward, "decode": forward}
    if backward is None:
        return counts

    def forward_backward(problem: Problem, cache: Cache, schedule: Schedule) -> Traffic:
        return forward(problem, cache, schedule) + backward(problem, cache, schedule)

    return {**counts, "backward": backward, "forward_backward": forward_backward}


ALGORITHMS: dict[str, dict[str, Count]] = {
    "materialised": _both(materialised.materialised, materialised.materialised)
    | {"forward_backward": materialised.materialised},
    "tiled-v1": _both(tiled.forward_kv_outer, tiled.backward_one_block),
    "tiled-v2": _both(tiled.forward_q_outer, tiled.backward_kv_outer),
    "decode": _both(tiled.decode, None),
    "gemm-qk": _both(materialised.gemm_qk, None),
    "gemm-pv": _both(materialised.gemm_pv, None),
}
"""Algorithm -> mode -> its count of bytes."""


L2_PARTITIONS = {(8, 0): 2, (9, 0): 2}
"""Compute capability -> partitions of the L2 (NVIDIA, A100 Tensor Core GPU Architecture, 2020, "A100 L2 cache": two, each of which
"caches data for memory accesses from SMs in the GPCs directly connected"; GH100 is laid out alike). Others are taken to have one."""


def l2_partitions(device: Device) -> int:
    """Partitions of a device's L2; 1 where that is not known, as of a MIG slice."""
    return 1 if device.mig or device.capability is None else L2_PARTITIONS.get(device.capability, 1)


def traffic(
    algorithm: str,
    problem: Problem,
    *,
    l2_bytes: int | None = None,
    l2_partitions: int = 1,
    sm_count: int | None = None,
    schedule: Schedule | None = None,
) -> Traffic:
    """HBM bytes of `problem` in its mode. UsageError for an unknown algorithm, or a mode that it does not have."""
    if algorithm not in ALGORITHMS:
        raise UsageError(
            f"unknown algorithm '{algorithm}'{nearest(algorithm, ALGORITHMS)} (known: {', '.join(ALGORITHMS)})"
        )
    counts = ALGORITHMS[algorithm]
    if problem.mode not in counts:
        raise UsageError(f"algorithm '{algorithm}' has no {problem.mode} pass (it has: {', '.join(counts)})")
    schedule = schedule or Schedule()
    return counts[problem.mode](problem, Cache(l2_bytes, sm_count, l2_partitions), schedule)


@dataclass(frozen=True, slots=True)
class Intensity:
    """Arithmetic intensity in FLOP per byte of HBM; the most traffic gives `low`."""

    low: float
    estimate: float
    high: float


def arithmetic_intensity(flops: int, moved: Traffic) -> Intensity:
    """Useful FLOPs over each end of the interval of bytes, and over the estimate."""
    return Intensity(flops / moved.high, flops / moved.estimate, flops / moved.low)


def theoretical_accesses(seq_len: int, head_dim: int, on_chip_elements: int) -> tuple[float, float]:
    """HBM accesses of one head in elements, up to a constant: standard Nd + N², flash N²d²/M (Dao et al. 2022, theorem 2).

    M is the on-chip memory of one SM in elements, d <= M <= Nd.
    """
    n, d = seq_len, head_dim
    return n * d + n**2, n**2 * d**2 / on_chip_elements
