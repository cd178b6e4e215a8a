"""Rows of a metrics frame for tests of pictures: times are given, work and bytes follow from the problem."""

from __future__ import annotations

import dataclasses
from typing import Any

import pandas as pd

from flashbench.hardware import catalogue
from flashbench.hardware.ceilings import Ceiling, spec_ceilings
from flashbench.model.flops import useful_flops
from flashbench.records import Case, Problem
from flashbench.report.roofs import Machine

H100 = "h100-sxm5-80gb"
A100 = "a100-pcie-80gb"


def machine(gpu: str, own: bool = False, *measured: Ceiling) -> Machine:
    return Machine(gpu, (*spec_ceilings(catalogue.get(gpu)), *measured), own)


def measured(level: str, value: float, dtype: str | None = None, regime: str = "isolated") -> Ceiling:
    unit = {"hbm": "GB/s", "compute": "TFLOP/s", "exp": "Texp/s"}[level]
    return Ceiling(level, dtype, "test", value, unit, "measured", regime)  # type: ignore[arg-type]


def row(provider: str, seq_len: int, tflops: float = 300.0, **more: Any) -> dict[str, Any]:
    """One ok case of 16 heads on an H100; keywords that are fields of Problem change the problem, others the row."""
    names = {f.name for f in dataclasses.fields(Problem)}
    base = Problem(1, 16, 16, seq_len, seq_len, 128, 128, "bf16")
    problem = dataclasses.replace(base, **{k: v for k, v in more.items() if k in names})
    flops = useful_flops(problem)
    head_bytes = problem.batch * problem.heads_q * problem.seq_q * problem.element_bytes
    compulsory = 2 * head_bytes * (problem.head_dim + problem.head_dim_v)
    time_ms = flops / tflops / 1e9
    made = {
        **dataclasses.asdict(problem),
        "run": "2026-01-01-test",
        "device_id": H100,
        "key": Case(provider, problem).key,
        "provider": provider,
        "status": "ok",
        "reason": None,
        "l2": "cold",
        "regime": "isolated",
        "time_ms": time_ms,
        "time_low_ms": time_ms * 0.99,
        "time_high_ms": time_ms * 1.02,
        "tflops": tflops,
        "peak_net_bytes": compulsory / 4,
        "hbm_bytes_low": compulsory,
        "hbm_bytes": compulsory * 1.25,
        "hbm_bytes_high": compulsory * 4,
        "intensity_low": flops / (compulsory * 4),
        "intensity": flops / (compulsory * 1.25),
        "intensity_high": flops / compulsory,
        "speedup": None,
    }
    return made | {k: v for k, v in more.items() if k not in names}


def frame(*rows: dict[str, Any]) -> pd.DataFrame:
    return pd.DataFrame(list(rows))


def sweep(
    provider: str, tflops: float = 300.0, lengths: tuple[int, ...] = (512, 1024, 2048), **more: Any
) -> list[dict[str, Any]]:
    return [row(provider, n, tflops * (1 + i / 20), **more) for i, n in enumerate(lengths)]
