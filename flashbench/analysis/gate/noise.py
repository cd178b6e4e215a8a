"""A against A: what a machine's own noise does to the gate, from one recorded campaign of unchanged rounds.

The campaign is split offline: adjacent rounds become pairs, a random choice of pairs becomes a screening, and the two sides take
turns in going first as they do in `ab`. Nothing changed between the sides, so whatever fires is a false alarm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flashbench.analysis.gate.rules import Rules
from flashbench.analysis.gate.shift import beyond, paired_shift, smallest_effect, threshold
from flashbench.analysis.gate.simulation import simulate
from flashbench.analysis.gate.worlds import SAMPLE_SD, Suite, World
from flashbench.errors import StoreError, UsageError
from flashbench.store.side import Side

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

SPLITS = 200
RESAMPLES = 10_000
SIMULATED_SUITES = 2000
HEADROOM = 1.25
"""A case's margin is its worst A/A shift times this."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """Medians of unchanged rounds: `times_ms` (cases, rounds), rounds in the order of measuring."""

    keys: tuple[str, ...]
    times_ms: Array
    left_out: tuple[str, ...] = ()
    """Cases that were not ok in every round."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate over cases with its 95 % bootstrap interval; cases are resampled, because one case's splits share their rounds."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class CaseNoise:
    """What one case's own noise asks for; every figure but `median_ms` is a fraction."""

    key: str
    median_ms: float
    process_sd: float
    """Standard deviation between neighbouring rounds, so that a slow drift does not count."""
    worst_shift: float
    """Largest A/A change of a screening's centre among the splits."""
    margin: float
    """Margin that no split exceeds, with headroom; at least the rules' own."""
    smallest_effect: float
    """Smallest slowdown found with about 90 %, at this noise and margin."""
    flagged: float
    """Splits in which a screening at the rules' margins fired; the gate would then have measured the case again."""


@dataclass(frozen=True, slots=True)
class NoiseModel:
    """What `calibrate` reports and writes."""

    cases: tuple[CaseNoise, ...]
    left_out: tuple[str, ...]
    rounds: int
    process_sd: float
    """Median over the cases."""
    drift: float
    """Median over the cases of the drift's size over the rounds of one screening."""
    screening: Rate
    """p < alpha without margins, per case: nominally alpha."""
    simulated: float
    """The same rate in suites that `simulation` draws with this process sd and drift."""
    flagged: Rate
    """Screenings that fire at the rules' margins."""
    confirmed: Rate | None
    """Screenings that fire and are confirmed by rounds outside them: false alarms. None with too few rounds for both stages."""


def campaign_of(side: Side, rules: Rules) -> Campaign:
    """The campaign in a side's rounds; StoreError when no case is complete."""
    import numpy as np

    everything = {seen.round for rounds in side.cases.values() for seen in rounds}
    complete, times = [], []
    for key, rounds in sorted(side.cases.items()):
        values = {seen.round: rules.metric.value(seen) for seen in rounds if seen.status == "ok"}
        sound = all(value is not None and math.isfinite(value) and value > 0 for value in values.values())
        if sound and values.keys() == everything:
            complete.append(key)
            times.append([values[number] for number in sorted(values)])
    if not complete:
        raise StoreError(
            "no case was ok in every round of this campaign; measure it again, or leave out the cases that fail"
        )
    left_out = tuple(sorted(side.cases.keys() - set(complete)))
    return Campaign(tuple(complete), np.array(times, dtype=float), left_out)


def split_pairs(rounds: int, pairs: int, splits: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Round indices (splits, pairs) of the two sides: neighbours paired, pairs chosen at random in order, first turn alternating."""
    import numpy as np

    available = rounds // 2
    if pairs > available:
        raise UsageError(
            f"{rounds} rounds hold {available} pairs, {pairs} are needed; record at least {2 * pairs} rounds"
        )
    chosen = np.sort(rng.permuted(np.tile(np.arange(available), (splits, 1)), axis=1)[:, :pairs], axis=1)
    first = (np.arange(pairs) + rng.integers(0, 2, (splits, 1))) % 2
    return 2 * chosen + first, 2 * chosen + 1 - first


def noise_model(campaign: Campaign, rules: Rules, splits: int = SPLITS, seed: int = 0) -> NoiseModel:
    """Margins per case and the gate's error rates on this machine; UsageError with fewer rounds than one screening takes."""
    import numpy as np

    centres, by_test, by_margin = _screened(campaign, rules, splits, seed)
    logs = np.log(campaign.times_ms)
    rounds = logs.shape[1]
    pairs = rounds // 2
    sd = np.diff(logs, axis=1).std(axis=1, ddof=1) / math.sqrt(2)
    worst = np.expm1(np.abs(centres).max(axis=1))
    medians = np.median(campaign.times_ms, axis=1)
    cases = []
    for index, key in enumerate(campaign.keys):
        margins = rules.margins(key)
        margin = max(margins.paired, _rounded_up(HEADROOM * float(worst[index])))
        differences = logs[index : index + 1, 1 : 2 * pairs : 2] - logs[index : index + 1, 0 : 2 * pairs : 2]
        shift = paired_shift(differences, rules.alpha)
        # The noise comes from all pairs of the campaign, the effect is that of a screening's few.
        scale = math.sqrt(pairs / rules.rounds)
        fewer = replace(
            shift, se=shift.se * scale, centre_se=shift.centre_se * scale, df=0 * shift.df + rules.rounds - 1
        )
        limit = threshold(margin, margins.absolute, float(medians[index]))
        effect = float(smallest_effect(fewer, limit, rules.alpha)[0])
        noise = CaseNoise(
            key,
            float(medians[index]),
            float(sd[index]),
            float(worst[index]),
            margin,
            effect,
            float(by_margin[index]),
        )
        cases.append(noise)
    confirmed = None
    if pairs >= 2 * rules.rounds:
        confirmed = _rate(_both_stages(campaign, rules, splits, seed), seed)
    typical_sd, drift = float(np.median(sd)), _drift(logs, rules)
    return NoiseModel(
        cases=tuple(cases),
        left_out=campaign.left_out,
        rounds=rounds,
        process_sd=typical_sd,
        drift=drift,
        screening=_rate(by_test, seed),
        simulated=_simulated_screening(typical_sd, drift, len(cases), rules),
        flagged=_rate(by_margin, seed),
        confirmed=confirmed,
    )


def overrides_of(model: NoiseModel, rules: Rules) -> dict[str, dict[str, float]]:
    """The `gate.overrides` that a configuration should take over: only cases whose noise asks for more than the rules give."""
    wider = (case for case in model.cases if case.margin > rules.margins(case.key).paired)
    return {case.key: {"margin": case.margin} for case in wider}


def _screened(campaign: Campaign, rules: Rules, splits: int, seed: int) -> tuple[Array, Array, Array]:
    """Centres (cases, splits), and per case the share of splits with p < alpha and of those that fire; both directions count alike."""
    import numpy as np

    logs = np.log(campaign.times_ms)
    base, new = split_pairs(logs.shape[1], rules.rounds, splits, np.random.default_rng(seed))
    shift = paired_shift(logs[:, new] - logs[:, base], rules.alpha)
    small = (shift.p_worse < rules.alpha).mean(axis=1) + (1 - shift.p_worse < rules.alpha).mean(axis=1)
    fires = (beyond(shift, _limits(campaign, rules)[:, None], rules.alpha) != 0).mean(axis=1)
    return shift.centre, small / 2, fires / 2


def _both_stages(campaign: Campaign, rules: Rules, splits: int, seed: int) -> Array:
    """Per case, the share of splits whose screening fires upwards and whose remaining pairs confirm it."""
    import numpy as np

    logs = np.log(campaign.times_ms)
    rng = np.random.default_rng(seed)
    pairs = logs.shape[1] // 2
    limits = _limits(campaign, rules)[:, None]
    flips = (np.arange(pairs) + rng.integers(0, 2, (splits, 1))) % 2
    order = rng.permuted(np.tile(np.arange(pairs), (splits, 1)), axis=1)
    # Taking turns by the pair's place in the campaign keeps ABBA in both stages.
    first = np.take_along_axis(flips, order, axis=1)
    shifts = logs[:, 2 * order + 1 - first] - logs[:, 2 * order + first]
    screening = beyond(paired_shift(shifts[..., : rules.rounds], rules.alpha), limits, rules.alpha)
    # Other cases of the suite would share the family's level, which only makes a confirmation rarer.
    fresh = beyond(paired_shift(shifts[..., rules.rounds :], rules.alpha), limits, rules.family_alpha)
    stands: Array = ((screening != 0) & (screening == fresh)).mean(axis=1) / 2
    return stands


def _drift(logs: Array, rules: Rules) -> float:
    """From the slope of a straight line through each case's rounds; a screening has two rounds to a pair."""
    import numpy as np

    slopes = np.polyfit(np.arange(logs.shape[1]), logs.T, 1)[0]
    return float(np.median(np.abs(slopes))) * 2 * rules.rounds


def _simulated_screening(process_sd: float, drift: float, cases: int, rules: Rules) -> float:
    # What was measured holds the noise of the median of a round's samples, which the model adds by itself.
    own_sd = math.sqrt(max(0.0, process_sd**2 - SAMPLE_SD**2))
    return simulate("paired", World(own_sd, drift=drift), Suite(cases, groups=1), SIMULATED_SUITES, 1, rules).screened


def _limits(campaign: Campaign, rules: Rules) -> Array:
    import numpy as np

    margins = [rules.margins(key) for key in campaign.keys]
    relative, absolute = (np.array([getattr(m, name) for m in margins]) for name in ("paired", "absolute"))
    return threshold(relative, absolute, np.median(campaign.times_ms, axis=1))


def _rate(per_case: Array, seed: int) -> Rate:
    import numpy as np

    rng = np.random.default_rng(seed)
    means = per_case[rng.integers(0, len(per_case), (RESAMPLES, len(per_case)))].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return Rate(float(per_case.mean()), float(low), float(high))


def _rounded_up(fraction: float) -> float:
    """To a tenth of a per cent, as a person writes margins."""
    return math.ceil(fraction * 1000 - 1e-9) / 1000
