"""Models of noise, and suites drawn from them.

The logarithm of a round's median is the sum of: the session (sd `session_sd`, shared by every round of a side in one session), the
process (sd `process_sd`, drawn anew each round; a share `common` of its variance moves every case of the round together), a second
mode that is slower by `slow_by` in a share `slow` of the processes, the median of 100 samples of sd 1 %, and a drift over the
session; times are then rounded to the timer's quantum. The cases' times are log-uniform from 0.05 to 5 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashbench.analysis.gate.rules import Rules
from flashbench.analysis.gate.suites import Decisions, paired_suites, stored_suites

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


SAMPLE_SD = 1.2533 * 0.01 / 10
"""Standard error of the median of 100 samples of sd 1 %."""
CHUNK = 250
"""Suites drawn at a time, to bound memory."""


@dataclass(frozen=True, slots=True)
class World:
    """One model of noise; fractions of the time unless the name says otherwise."""

    process_sd: float = 0.006
    session_sd: float = 0.015
    anchor_correlation: float = 0.9
    """Between the session effect of a case and that of its anchor."""
    drift: float = 0.01
    """Over a session, monotone."""
    slow: float = 0.0
    slow_by: float = 0.03
    slow_whole: bool = False
    """Whether a slow process is slow for all of its cases, or each case draws its own mode."""
    common: float = 0.0
    quantum_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Suite:
    """What is judged at once: cases in groups of equal size, and the slowdown that some of them really have."""

    cases: int = 100
    groups: int = 5
    slowdown: float = 0.0
    slowed: int = 0
    """The first so many cases."""


def draw_paired(world: World, suite: Suite, rules: Rules, suites: int, rng: np.random.Generator) -> Iterator[Decisions]:
    """Decisions on `suites` suites of `ab`, in chunks: rounds in ABBA order, the session shared by both sides."""
    import numpy as np

    for count in _chunks(suites):
        shape = (count, suite.cases, 1)
        times = np.exp(rng.uniform(np.log(0.05), np.log(5.0), shape) + world.session_sd * rng.standard_normal(shape))

        def stage(rounds: int, times: Array = times) -> tuple[Array, Array]:
            turn = np.arange(rounds)
            places = 2 * turn + turn % 2, 2 * turn + 1 - turn % 2
            sides = []
            for place, slowdown in zip(places, (np.zeros(suite.cases), _slowdowns(suite)), strict=True):
                noise = _noise(world, (times.shape[0], suite.cases, rounds), rng)
                logs = noise + world.drift * place / (2 * rounds) + slowdown[:, None]
                sides.append(_rounded(times * np.exp(logs), world))
            return sides[0], sides[1]

        yield paired_suites(stage(rules.rounds), stage(rules.confirm_rounds), suite.groups, rules)


def session_effects(world: World, of_case: Array, suites: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Log effects of one session on the two anchors (suites, 2), and on the cases (suites, cases), whose anchors `of_case` names."""
    import numpy as np

    rho = world.anchor_correlation
    anchor = rng.standard_normal((suites, 2))
    own = rng.standard_normal((suites, len(of_case)))
    return world.session_sd * anchor, world.session_sd * (rho * anchor[:, of_case] + np.sqrt(1 - rho**2) * own)


def draw_stored(
    world: World,
    suite: Suite,
    rules: Rules,
    suites: int,
    rng: np.random.Generator,
    *,
    anchored: bool = True,
    confirmed: bool = True,
) -> Iterator[Decisions]:
    """Decisions on `suites` suites of the stored gate: two sessions, two anchors that take turns over the groups."""
    import numpy as np

    # A group is of one mode and so has one anchor, whose own noise moves the whole group.
    of_case = np.arange(suite.cases) * suite.groups // suite.cases % 2
    for count in _chunks(suites):
        times = np.exp(rng.uniform(np.log(0.05), np.log(5.0), (count, suite.cases, 1)))

        def stage(
            effects: tuple[Array, Array], rounds: int, slowdown: Array, times: Array = times
        ) -> tuple[Array, Array]:
            anchor, own = effects
            noise = (
                _noise(world, (times.shape[0], suite.cases + 2, rounds), rng) + world.drift * np.arange(rounds) / rounds
            )
            logs = noise[:, : suite.cases] + own[..., None] + slowdown[:, None]
            reference = noise[:, suite.cases :] + anchor[..., None]
            return _rounded(times * np.exp(logs), world), np.exp(reference)[:, of_case]

        old, today = (session_effects(world, of_case, count, rng) for _ in range(2))
        base = stage(old, rules.rounds, np.zeros(suite.cases))
        new = stage(today, rules.rounds, _slowdowns(suite))
        fresh = stage(today, rules.confirm_rounds, _slowdowns(suite)) if confirmed else None
        yield stored_suites(base, new, fresh, suite.groups, rules, anchored=anchored)


def _noise(world: World, shape: tuple[int, int, int], rng: np.random.Generator) -> Array:
    """Log effects (suites, cases, rounds) that are drawn anew in every process."""
    import numpy as np

    suites, _, rounds = shape
    noise = np.sqrt(world.process_sd**2 * (1 - world.common) + SAMPLE_SD**2) * rng.standard_normal(
        shape, dtype=np.float32
    )
    if world.common:
        shared = rng.standard_normal((suites, 1, rounds), dtype=np.float32)
        noise = noise + world.process_sd * np.sqrt(world.common) * shared
    if world.slow:
        draws = rng.random((suites, 1, rounds) if world.slow_whole else shape, dtype=np.float32)
        noise = noise + np.log1p(world.slow_by) * (draws < world.slow)
    effects: Array = noise.astype(np.float64)
    return effects


def _slowdowns(suite: Suite) -> Array:
    import numpy as np

    return np.where(np.arange(suite.cases) < suite.slowed, np.log1p(suite.slowdown), 0.0)


def _rounded(times_ms: Array, world: World) -> Array:
    """Times as a clock of this quantum reads them; at least one tick."""
    import numpy as np

    if not world.quantum_ms:
        return times_ms
    ticks: Array = np.maximum(np.round(times_ms / world.quantum_ms), 1) * world.quantum_ms
    return ticks


def _chunks(suites: int) -> Iterator[int]:
    while suites > 0:
        yield min(suites, CHUNK)
        suites -= CHUNK
