"""Runs on disk, made of plain numbers: what the tests of the commands over stored runs share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flashbench.records import Case, Check, Device, Memory, Row, State, Timing, to_plain
from flashbench.store.anchors import Anchor, append_anchors
from flashbench.store.run import RunWriter

A, B, C = (f"sdpa-flash forward bf16 b4 h16 s{seq} d128 causal" for seq in (1024, 2048, 4096))
H200 = Device(
    "cuda", "NVIDIA H200", 150_000_000_000, 0, "GPU-1", (9, 0), 132, 50 << 20,
    power_limit_w=700.0, mig=False, versions={"torch": "2.11.0", "driver": "570.1"},
)  # fmt: skip
H200_ID = "h200-sxm-141gb"
Visits = Sequence[float | tuple[str, str | None]]
"""One entry per round: a time in ms, or a status and its reason."""


def steady(level_ms: float, count: int = 6, sd: float = 0.002, seed: int = 0) -> list[float]:
    """Round medians around a level."""
    return [float(ms) for ms in level_ms * np.exp(np.random.default_rng(seed).normal(0, sd, count))]


def write_run(
    root: Path,
    cases: Mapping[str, Visits],
    *,
    device: Device = H200,
    device_id: str = H200_ID,
    gate: Mapping[str, Any] | None = None,
    anchors: bool = True,
    throttled: tuple[str, ...] | Mapping[str, tuple[str, ...]] = (),
    peak_bytes: int = 64 << 20,
    first_round: Mapping[str, int] | None = None,
    name: str = "ci",
    **header: Any,
) -> Path:
    """A run's folder, written as the runner writes it; `first_round` of a case is 0 unless given."""
    facts = {"device": to_plain(device), "config": {"gate": dict(gate or {})}, "cases": list(cases), **header}
    with RunWriter.create(root, device_id, name, facts) as writer:
        last = 0
        for key, visits in cases.items():
            hot = throttled.get(key, ()) if isinstance(throttled, Mapping) else throttled
            for number, visit in enumerate(visits, start=(first_round or {}).get(key, 0)):
                last = max(last, number)
                ok = isinstance(visit, float)
                row = Row(
                    Case.from_key(key),
                    number,
                    "ok" if ok else visit[0],  # type: ignore[index, arg-type]
                    None if ok else visit[1],  # type: ignore[index]
                    check=Check("out", 1e-3, 1e-2, 2e-3, 2e-2, 1e-3, 1e-2, "float64") if ok else None,
                    timing=Timing("events", "cold", "isolated", 5, 100.0) if ok else None,
                    memory=Memory(1 << 20, (1 << 20) + peak_bytes) if ok else None,
                    state=State((1980, 1980), throttle_reasons=hot) if ok else None,
                )
                writer.append(row, [visit] * 5 if ok else ())  # type: ignore[list-item]
        if anchors:
            for number in range(last + 1):
                append_anchors(writer.path, number, [Anchor("gemm", (0.2, 0.2, 0.2)), Anchor("copy", (0.3, 0.3, 0.3))])
        return writer.path
