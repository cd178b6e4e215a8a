"""Sides of comparisons, made of plain numbers: what the tests of the gate share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from flashbench.analysis.gate.rules import Rules
from flashbench.analysis.gate.screening import conclude, confirm, screen
from flashbench.analysis.gate.verdict import Comparison, Finding
from flashbench.store.side import Identity, Observation, Side

A, B, C = (f"flash-v2 forward bf16 b4 h16 s{seq} d128 causal" for seq in (1024, 2048, 4096))
H200 = Identity("h200-sxm-141gb", (9, 0), False, 700.0)
FEW = Rules(min_rounds=2)
"""For cases whose numbers a reader should see in full: three rounds do."""


def rounds(times_ms: Iterable[float | None], first: int = 0, **facts: Any) -> tuple[Observation, ...]:
    return tuple(Observation(first + i, median_ms=ms, **facts) for i, ms in enumerate(times_ms))


def side(cases: Mapping[str, Sequence[float | None] | tuple[Observation, ...]], **facts: Any) -> Side:
    made = {
        key: tuple(values) if values and isinstance(values[0], Observation) else rounds(values)  # type: ignore[arg-type]
        for key, values in cases.items()
    }
    return Side(made, **{"identity": H200, **facts})


def noisy(level_ms: float, count: int = 6, sd: float = 0.004, seed: int = 0) -> list[float]:
    """Round medians around a level."""
    return [float(ms) for ms in level_ms * np.exp(np.random.default_rng(seed).normal(0, sd, count))]


def judged(base: Side, new: Side, rules: Rules = FEW, pairing: Any = "paired") -> Comparison:
    """What two sides say without fresh rounds."""
    return conclude(screen(base, new, rules, pairing))


def twice(
    base: Side, new: Side, fresh_base: Side | None, fresh_new: Side, rules: Rules, pairing: Any = "paired"
) -> Comparison:
    return confirm(screen(base, new, rules, pairing), fresh_base, fresh_new)


def of(comparison: Comparison, key: str) -> Finding:
    return next(finding for finding in (*comparison.cases, *comparison.groups) if finding.key == key)
