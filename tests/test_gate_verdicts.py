"""What the gate says about two sides, one situation after the other, and the exit code that each has (group GA of the public faults)."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
from gate_sides import FEW, H200, A, B, C, judged, noisy, of, rounds, side, twice
from hypothesis import given, settings
from hypothesis import strategies as st

from flashbench.analysis.gate.rules import METRICS, Rules
from flashbench.analysis.gate.screening import conclude, no_baseline, screen
from flashbench.analysis.gate.verdict import Comparison, Finding, outcome
from flashbench.errors import UsageError
from flashbench.records import FAILED_STATUSES
from flashbench.store.side import Identity, Observation, Side, slowed, with_tflops


def code(comparison: Comparison) -> int:
    return outcome(comparison)[0]


STEADY = side({A: noisy(1.0, seed=1), B: noisy(2.0, seed=2), C: noisy(3.0, seed=3)})


# GA-02: a case that vanished, failed, or is new


def test_a_missing_case_is_no_pass() -> None:
    comparison = judged(side({A: [1, 1, 1], B: [1, 1, 1]}), side({A: [1, 1, 1]}))
    assert of(comparison, B).verdict == "missing"
    assert code(comparison) == 3


def test_a_missing_case_that_is_allowed_passes_and_still_shows() -> None:
    rules = dataclasses.replace(FEW, allow_missing=("* s2048 *",))
    comparison = judged(side({A: [1, 1, 1], B: [1, 1, 1]}), side({A: [1, 1, 1]}), rules)
    assert of(comparison, B).verdict == "missing"
    assert code(comparison) == 0


def test_a_case_that_now_runs_out_of_memory_has_failed() -> None:
    new = side({A: [1, 1, 1], B: rounds([None] * 3, status="oom", reason="needs 200 GB")})
    comparison = judged(side({A: [1, 1, 1], B: [1, 1, 1]}), new)
    assert of(comparison, B).verdict == "failed"
    assert "needs 200 GB" in outcome(comparison)[1]
    assert code(comparison) == 4


@pytest.mark.parametrize("status", sorted(FAILED_STATUSES))
@pytest.mark.parametrize("pairing", ["paired", "stored"])
def test_a_case_that_failed_in_a_single_round_has_failed(status: str, pairing: str) -> None:
    seen = list(rounds([1, 1, 1]))
    seen[1] = Observation(1, status, reason="why")
    comparison = judged(side({A: [1, 1, 1], B: [1, 1, 1]}), side({A: [1, 1, 1], B: tuple(seen)}), FEW, pairing)
    assert of(comparison, B).reason == f"{status} in round 1: why"
    assert code(comparison) == 4


def test_a_failure_on_the_base_side_of_ab_is_a_failure_of_this_job() -> None:
    base = side({A: [1, 1, 1], B: rounds([None] * 3, status="crashed")})
    comparison = judged(base, side({A: [1, 1, 1], B: [1, 1, 1]}))
    assert of(comparison, B).verdict == "failed"
    assert "base side" in of(comparison, B).reason
    assert code(comparison) == 4


@pytest.mark.parametrize("status", ["oom", "incorrect", "unsupported"])
def test_a_case_that_did_not_run_in_a_stored_baseline_and_now_does_is_new(status: str) -> None:
    base = side({A: [1, 1, 1], B: rounds([None], status=status)})
    comparison = judged(base, side({A: [1, 1, 1], B: [1, 1, 1]}), FEW, "stored")
    assert of(comparison, B).verdict == "new"
    assert code(comparison) == 0


def test_a_case_that_is_now_declared_unsupported_counts_as_missing() -> None:
    new = side({A: [1, 1, 1], B: rounds([None] * 3, status="unsupported", reason="head_dim 128")})
    comparison = judged(side({A: [1, 1, 1], B: [1, 1, 1]}), new)
    assert of(comparison, B).verdict == "missing"
    assert code(comparison) == 3


@pytest.mark.parametrize("status", ["oom", "unsupported"])
def test_a_case_that_runs_on_neither_side_is_as_before(status: str) -> None:
    seen = rounds([None] * 3, status=status)
    comparison = judged(side({A: [1, 1, 1], B: seen}), side({A: [1, 1, 1], B: seen}))
    assert of(comparison, B).verdict == "pass"
    assert code(comparison) == 0


def test_a_new_case_is_shown_and_fails_only_on_request() -> None:
    base, new = side({A: [1, 1, 1]}), side({A: [1, 1, 1], C: [1, 1, 1]})
    comparison = judged(base, new)
    assert of(comparison, C).verdict == "new"
    assert code(comparison) == 0
    assert code(judged(base, new, dataclasses.replace(FEW, fail_on=FEW.fail_on | {"new"}))) == 3


def test_a_case_that_was_only_checked_has_no_trustworthy_number() -> None:
    comparison = judged(side({A: [1, 1, 1]}), side({A: rounds([None] * 3, status="checked")}))
    assert of(comparison, A).verdict == "inconclusive"
    assert code(comparison) == 3


# GA-03: a baseline that is no time


@pytest.mark.parametrize("bad", [0.0, None, math.nan, -1.0, math.inf])
@pytest.mark.parametrize("pairing", ["paired", "stored"])
def test_a_baseline_that_is_no_time_is_inconclusive_with_its_own_reason(bad: float | None, pairing: str) -> None:
    comparison = judged(side({A: [1, 1, 1], B: [1, bad, 1]}), side({A: [1, 1, 1], B: [1, 1, 1]}), FEW, pairing)
    assert of(comparison, B).verdict == "inconclusive"
    assert "baseline invalid" in of(comparison, B).reason
    assert "round 1" in of(comparison, B).reason
    assert code(comparison) == 3


@pytest.mark.parametrize("bad", [0.0, None, math.nan, -1.0])
def test_a_new_value_that_is_no_time_is_not_trusted_either(bad: float | None) -> None:
    comparison = judged(side({A: [1, 1, 1]}), side({A: [1, bad, 1]}))
    assert "new side invalid" in of(comparison, A).reason
    assert code(comparison) == 3


# GA-05: what a percentage means


@pytest.mark.parametrize(("new_ms", "verdict"), [(110.0, "pass"), (110.0001, "regression")])
@pytest.mark.parametrize("pairing", ["paired", "stored"])
def test_exactly_ten_per_cent_passes_and_more_does_not(new_ms: float, verdict: str, pairing: str) -> None:
    rules = dataclasses.replace(FEW, margin=0.10, stored_margin=0.10, unanchored_margin=0.0, unanchored_session_sd=0.0)
    assert of(judged(side({A: [100.0] * 3}), side({A: [new_ms] * 3}), rules, pairing), A).verdict == verdict


def test_the_margin_itself_passes_whatever_the_rounding_of_its_logarithm() -> None:
    tenth = dataclasses.replace(FEW, margin=0.10)
    for level in range(10, 1000, 10):
        assert (
            of(judged(side({A: [float(level)] * 3}), side({A: [level * 11 / 10] * 3}), tenth), A).verdict == "pass"
        ), level


def test_a_regression_names_both_values_and_the_increase() -> None:
    reason = of(judged(side({A: [100.0] * 3}), side({A: [230.0] * 3})), A).reason
    assert "from 100 to 230 ms" in reason
    assert "+130.0 %" in reason


# GA-06, GA-14: improvements


def test_a_large_improvement_passes_the_job() -> None:
    comparison = judged(side({A: [10.0] * 3}), side({A: [1.0] * 3}))
    assert of(comparison, A).verdict == "improvement"
    assert code(comparison) == 0


def test_a_factor_and_a_percentage_never_contradict_each_other() -> None:
    faster = of(judged(side({A: [4.0] * 3}), side({A: [1.0] * 3})), A).reason
    assert "-75.0 %" in faster
    assert "4.00x faster" in faster
    slower = of(judged(side({A: [1.0] * 3}), side({A: [4.0] * 3})), A).reason
    assert "+300.0 %" in slower
    assert "4.00x slower" in slower


# GA-07: tiny kernels


def test_a_change_has_to_exceed_the_absolute_margin_too() -> None:
    rules = dataclasses.replace(FEW, margin_abs=0.005)
    comparison = judged(side({A: [0.010] * 3, B: [85.0] * 3}), side({A: [0.012] * 3, B: [130.0] * 3}), rules)
    assert of(comparison, A).verdict != "regression"
    assert of(comparison, B).verdict == "regression"


def test_a_one_microsecond_step_of_the_timer_is_no_regression() -> None:
    comparison = judged(side({A: [0.010] * 6}), side({A: [0.011] * 6}), Rules())
    assert of(comparison, A).verdict == "pass"


# GA-08: the centre is a median


@pytest.mark.parametrize(("new_ms", "expected"), [(11.5, 0), (16.0, 1)])
def test_one_outlier_in_the_history_does_not_move_the_baseline(new_ms: float, expected: int) -> None:
    base = side({A: [11.3] * 19 + [21.4]}, anchors={"gemm": dict.fromkeys(range(20), 1.0)})
    new = side({A: [new_ms] * 6}, anchors={"gemm": dict.fromkeys(range(6), 1.0)})
    comparison = judged(base, new, Rules(), "stored")
    assert of(comparison, A).base == 11.3
    assert code(comparison) == expected


# GA-09: the machine


def test_another_gpu_is_not_compared() -> None:
    base = side({A: [1, 1, 1]}, identity=Identity("a100-sxm4-80gb", (8, 0), False, 400.0))
    comparison = judged(base, side({A: [9, 9, 9]}))
    assert of(comparison, A).verdict == "unlike machine"
    assert "a100-sxm4-80gb against h200-sxm-141gb" in outcome(comparison)[1]
    assert code(comparison) == 3


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(H200, mig=True),
        dataclasses.replace(H200, power_limit_w=600.0),
        dataclasses.replace(H200, capability=(10, 0)),
    ],
)
def test_another_setting_of_the_same_gpu_is_not_compared(other: Identity) -> None:
    assert code(judged(STEADY, dataclasses.replace(STEADY, identity=other))) == 3


@pytest.mark.parametrize(
    "other", [dataclasses.replace(H200, power_limit_w=699.99), Identity("h200-sxm-141gb"), Identity()]
)
def test_what_drifts_or_could_not_be_read_does_not_make_another_machine(other: Identity) -> None:
    assert code(judged(STEADY, dataclasses.replace(STEADY, identity=other))) == 0


def test_another_driver_is_compared_and_told() -> None:
    base = dataclasses.replace(STEADY, versions={"driver": "570.1", "torch": "2.11"})
    new = dataclasses.replace(STEADY, versions={"driver": "580.9", "torch": "2.11"})
    comparison = judged(base, new)
    assert code(comparison) == 0
    assert comparison.notes == ("driver differs: 570.1 in the base, 580.9 in the new side",)


def test_a_clock_that_reads_a_little_differently_is_the_same_machine() -> None:
    base = side({A: rounds([1.0] * 3, sm_clock_mhz=1410)})
    new = side({A: rounds([1.0] * 3, sm_clock_mhz=1409)})
    assert of(judged(base, new), A).verdict == "pass"


@pytest.mark.parametrize(
    ("field", "ours", "theirs"),
    [("method", "events", "graph"), ("l2", "cold", "warm"), ("regime", "isolated", "sustained")],
)
def test_a_case_that_was_timed_in_another_way_is_not_compared(field: str, ours: str, theirs: str) -> None:
    facts: list[dict[str, Any]] = [{field: ours}, {field: theirs}]
    base, new = (side({A: rounds([1, 1, 1], **fact), B: [1, 1, 1]}) for fact in facts)
    comparison = judged(base, new)
    assert of(comparison, A).verdict == "unlike machine"
    assert of(comparison, B).verdict == "pass"
    assert code(comparison) == 3


# GA-11: a subset, in another order


def test_cases_are_matched_by_key_whatever_their_order_and_number() -> None:
    keys = [f"naive forward fp32 b1 h1 s{seq} d64" for seq in range(1, 13)]
    base = side({key: [1, 1, 1] for key in keys})
    new = side({key: [1, 1, 1] for key in (keys[7], keys[2])})
    comparison = judged(base, new)
    assert comparison.counts == {"missing": 10, "pass": 2}
    assert code(judged(base, new, dataclasses.replace(FEW, allow_missing=("*",)))) == 0


# GA-12: exit codes of a comparison; a glob that matches nothing


def test_a_regression_has_exit_code_1_and_no_regression_0() -> None:
    assert code(judged(STEADY, slowed(STEADY, 0.1))) == 1
    assert code(judged(STEADY, STEADY)) == 0


def test_a_glob_that_matches_no_case_is_refused_with_the_nearest_one() -> None:
    rules = dataclasses.replace(FEW, overrides={"flsh-v2 forward bf16 b4 h16 s1024 d128 causal": {"margin": 0.1}})
    with pytest.raises(UsageError, match=r"matches no case; did you mean 'flash-v2 forward bf16 b4 h16 s1024"):
        screen(STEADY, STEADY, rules, "paired")
    with pytest.raises(UsageError, match="matches no case"):
        screen(STEADY, STEADY, dataclasses.replace(FEW, allow_missing=("naive *",)), "paired")


def test_an_override_changes_the_margin_of_the_cases_it_matches() -> None:
    rules = dataclasses.replace(FEW, overrides={"*": {"margin": 0.08}, "* s2048 *": {"margin": 0.5}})
    comparison = judged(STEADY, slowed(STEADY, 0.2), rules)
    assert [of(comparison, key).verdict for key in (A, B, C)] == ["regression", "pass", "regression"]


# GA-15: no spread at all


def test_identical_rounds_give_a_verdict_and_no_infinities() -> None:
    comparison = judged(side({A: [1, 1, 1], B: [1, 1, 1]}), side({A: [1, 1, 1], B: [1.2, 1.2, 1.2]}))
    assert of(comparison, A).verdict == "pass"
    assert of(comparison, B).verdict == "regression"
    figures = [
        value for finding in comparison.cases for value in dataclasses.astuple(finding) if isinstance(value, float)
    ]
    assert all(map(math.isfinite, figures))


# No baseline, nothing in common, too few


def test_no_baseline_has_its_own_verdict_and_reason() -> None:
    comparison = no_baseline(STEADY, Rules(), "no baseline at 'results/baselines/h200/ci.jsonl'")
    assert {finding.verdict for finding in comparison.cases} == {"no baseline"}
    assert outcome(comparison)[0] == 3
    assert "results/baselines/h200/ci.jsonl" in outcome(comparison)[1]


def test_nothing_in_common_is_no_pass_even_when_missing_is_allowed() -> None:
    rules = dataclasses.replace(FEW, allow_missing=("*",))
    comparison = judged(side({A: [1, 1, 1]}), side({B: [1, 1, 1]}), rules)
    assert outcome(comparison)[0] == 3
    assert "no case in common" in outcome(comparison)[1]


def test_two_empty_sides_are_no_pass() -> None:
    assert code(judged(side({}), side({}))) == 3


def test_too_few_rounds_are_told_with_the_number_needed() -> None:
    comparison = judged(side({A: [1] * 6}), side({A: [1] * 4}), Rules())
    assert of(comparison, A).reason == "too few rounds: 4, at least 5 are needed"
    assert code(comparison) == 3


def test_rounds_that_only_one_side_has_are_no_pairs() -> None:
    base, new = side({A: rounds([1.0] * 6)}), side({A: rounds([1.0] * 6, first=3)})
    assert "too few rounds: 3" in of(judged(base, new, Rules()), A).reason


def test_fewer_cases_than_the_least_number_are_no_verdict() -> None:
    assert code(judged(STEADY, STEADY, dataclasses.replace(FEW, min_cases=3))) == 0
    assert code(judged(STEADY, STEADY, dataclasses.replace(FEW, min_cases=4))) == 3


# Throttling and clocks


HOT = ("hardware thermal slowdown",)


def test_heat_on_one_side_makes_a_case_inconclusive() -> None:
    base = side({A: rounds([1.0] * 3, throttle_reasons=()), B: [1.0] * 3})
    new = side({A: rounds([1.5] * 3, throttle_reasons=HOT), B: [1.0] * 3})
    comparison = judged(base, new)
    assert of(comparison, A).verdict == "inconclusive"
    assert "hardware thermal slowdown" in of(comparison, A).reason
    assert code(comparison) == 0
    assert code(judged(base, new, dataclasses.replace(FEW, fail_on=FEW.fail_on | {"inconclusive"}))) == 3


def test_when_no_case_at_all_could_be_judged_nothing_has_passed() -> None:
    new = side({A: rounds([1.0] * 3, throttle_reasons=HOT)})
    assert code(judged(side({A: [1.0] * 3}), new)) == 3


def test_the_software_power_cap_alone_is_normal() -> None:
    new = side({A: rounds([1.0] * 3, throttle_reasons=("software power cap",))})
    assert of(judged(side({A: [1.0] * 3}), new), A).verdict == "pass"


def test_time_that_differs_while_cycles_do_not_is_the_clock_and_not_the_code() -> None:
    base = side({A: rounds([1.0] * 3, sm_clock_mhz=1980)})
    new = side({A: rounds([1.1] * 3, sm_clock_mhz=1800)})
    finding = of(judged(base, new), A)
    assert finding.verdict == "inconclusive"
    assert finding.reason.startswith("clock, not code: time +10.0 % but cycles +0.0 %")


@pytest.mark.parametrize("clock_mhz", [1980, 1940, None])
def test_time_that_the_clock_does_not_explain_is_a_regression(clock_mhz: float | None) -> None:
    base = side({A: rounds([1.0] * 3, sm_clock_mhz=1980)})
    new = side({A: rounds([1.1] * 3, sm_clock_mhz=clock_mhz)})
    assert of(judged(base, new), A).verdict == "regression"


def test_a_slow_clock_does_not_excuse_cycles_that_are_beyond_the_margin_too() -> None:
    base = side({A: rounds([1.0] * 3, sm_clock_mhz=2000)})
    new = side({A: rounds([1.1] * 3, sm_clock_mhz=1880)})
    assert of(judged(base, new), A).verdict == "regression"


def test_a_clock_that_makes_up_less_than_half_of_the_change_does_not_excuse_it() -> None:
    base = side({A: rounds([1.0] * 3, sm_clock_mhz=2000)})
    new = side({A: rounds([1.025] * 3, sm_clock_mhz=1980)})
    assert of(judged(base, new), A).verdict == "regression"


# Stored baselines and anchors


def session(level: float, machine: float, count: int = 6, seed: int = 0) -> Side:
    """A case and a GEMM of one session, on a machine that is in some mood."""
    gemm = dict(enumerate(noisy(machine, count, seed=seed + 1)))
    return side({A: noisy(level * machine, count, seed=seed)}, anchors={"gemm": gemm})


def test_a_mood_of_the_machine_that_the_anchor_shares_is_no_regression() -> None:
    comparison = judged(session(1.0, 1.0), session(1.0, 1.12, seed=7), Rules(), "stored")
    assert of(comparison, A).verdict == "pass"


def test_a_slowdown_that_the_mood_of_the_machine_hides_is_found() -> None:
    comparison = judged(session(1.0, 1.12), session(1.12, 1.0, seed=7), Rules(), "stored")
    assert of(comparison, A).verdict == "regression"
    assert "relative to the anchor" in of(comparison, A).reason


def test_without_an_anchor_the_margin_is_wider_and_says_so() -> None:
    base, new = side({A: noisy(1.0)}), side({A: noisy(1.075, seed=5)})
    comparison = judged(base, new, Rules(), "stored")
    assert of(comparison, A).verdict != "regression"
    assert of(comparison, A).margin == pytest.approx(0.08)
    assert "no anchor" in comparison.notes[0]


def test_decode_goes_with_the_copy_and_the_rest_with_the_gemm() -> None:
    decode = "flash-decode decode bf16 b64 h32/8 s1/4096 d128"
    base = side(
        {A: [1.0] * 6, decode: [1.0] * 6}, anchors={name: dict.fromkeys(range(6), 1.0) for name in ("copy", "gemm")}
    )
    moved = {"copy": dict.fromkeys(range(6), 1.2), "gemm": dict.fromkeys(range(6), 1.0)}
    new = side({A: [1.0] * 6, decode: [1.2] * 6}, anchors=moved)
    comparison = judged(base, new, Rules(), "stored")
    assert of(comparison, decode).change == pytest.approx(0.0)
    assert of(comparison, A).change == pytest.approx(0.0)


def test_a_round_without_its_anchor_is_not_used() -> None:
    base = side({A: [1.0] * 6}, anchors={"gemm": dict.fromkeys(range(6), 1.0)})
    new = side({A: [1.0] * 6}, anchors={"gemm": dict.fromkeys(range(4), 1.0)})
    assert "too few rounds: 4" in of(judged(base, new, Rules(), "stored"), A).reason


# Screening and confirmation


def test_only_what_was_flagged_is_measured_again() -> None:
    assert screen(STEADY, slowed(STEADY, 0.05, [B]), Rules(), "paired").to_confirm == (B,)
    assert screen(STEADY, STEADY, Rules(), "paired").to_confirm == ()


def test_a_flag_that_fresh_rounds_do_not_confirm_is_cleared() -> None:
    fresh = side({B: rounds(noisy(2.0, 12, seed=8), first=6)})
    comparison = twice(STEADY, slowed(STEADY, 0.05, [B]), fresh, fresh, Rules())
    assert of(comparison, B).verdict == "cleared"
    assert of(comparison, B).reason == "+5.0 % in 6 rounds, +0.0 % in 12 fresh ones"
    assert code(comparison) == 0


def test_a_flag_that_fresh_rounds_confirm_is_a_regression_and_shows_the_fresh_figures() -> None:
    fresh = side({B: rounds(noisy(2.0, 12, seed=8), first=6)})
    comparison = twice(STEADY, slowed(STEADY, 0.09, [B]), fresh, slowed(fresh, 0.05), Rules())
    assert of(comparison, B).verdict == "regression"
    assert of(comparison, B).change == pytest.approx(0.05)
    assert of(comparison, B).rounds == 12
    assert code(comparison) == 1


def test_a_flag_whose_fresh_rounds_are_missing_is_no_pass() -> None:
    comparison = twice(STEADY, slowed(STEADY, 0.05, [B]), side({}), side({}), Rules())
    assert of(comparison, B).verdict == "inconclusive"
    assert code(comparison) == 3


def test_a_flagged_case_that_crashes_when_measured_again_has_failed() -> None:
    fresh = side({B: rounds(noisy(2.0, 12, seed=8), first=6)})
    crashed = side({B: rounds([None] * 12, first=6, status="crashed", reason="illegal access")})
    assert code(twice(STEADY, slowed(STEADY, 0.05, [B]), fresh, crashed, Rules())) == 4


def test_the_stored_gate_confirms_with_fresh_rounds_and_fresh_anchors() -> None:
    base, new = session(1.0, 1.0), session(1.12, 1.03, seed=7)
    confirmed = twice(base, new, None, session(1.12, 1.03, 12, seed=9), Rules(), "stored")
    cleared = twice(base, new, None, session(1.0, 1.03, 12, seed=9), Rules(), "stored")
    assert of(confirmed, A).verdict == "regression"
    assert of(cleared, A).verdict == "cleared"


# Groups


def test_a_small_slowdown_across_the_board_shows_in_the_geometric_mean() -> None:
    keys = [f"flash-v2 forward bf16 b1 h16 s{1024 * n} d128" for n in range(1, 13)]
    base = side({key: noisy(1.0, seed=n) for n, key in enumerate(keys)})
    new = side({key: noisy(1.015, seed=50 + n) for n, key in enumerate(keys)})
    first = screen(base, new, Rules(), "paired")
    assert set(first.to_confirm) == set(keys)
    fresh = side({key: rounds(noisy(1.0, 12, seed=100 + n), first=6) for n, key in enumerate(keys)})
    again = side({key: rounds(noisy(1.015, 12, seed=150 + n), first=6) for n, key in enumerate(keys)})
    comparison = twice(base, new, fresh, again, Rules())
    assert {finding.verdict for finding in comparison.cases} <= {"pass", "cleared"}
    group = of(comparison, "flash-v2 forward")
    assert group.verdict == "regression"
    assert group.change == pytest.approx(0.015, abs=0.002)
    assert code(comparison) == 1


def test_a_case_that_fails_while_its_group_is_measured_again_has_failed() -> None:
    keys = [f"flash-v2 forward bf16 b1 h16 s{1024 * n} d128" for n in range(1, 7)]
    base = side({key: [1.0] * 6 for key in keys})
    new, again = slowed(base, 0.015), side({key: rounds([1.0] * 12, first=6) for key in keys})
    broken = dict(slowed(again, 0.015).cases) | {keys[0]: rounds([None] * 12, first=6, status="timeout")}
    comparison = twice(base, new, again, side(broken), Rules())
    assert of(comparison, keys[0]).verdict == "failed"
    assert of(comparison, "flash-v2 forward").verdict == "regression"
    assert code(comparison) == 4


def test_a_group_is_made_of_the_cases_that_share_its_rounds() -> None:
    keys = [f"flash-v2 forward bf16 b1 h16 s{1024 * n} d128" for n in range(1, 5)]
    most = {key: rounds([1.0] * 5) for key in keys[1:]}
    both = side({keys[0]: rounds([1.0] * 6)} | most)
    group = of(judged(both, both, Rules()), "flash-v2 forward")
    assert group.members == tuple(keys[1:])
    assert group.rounds == 5


def test_one_slow_case_does_not_condemn_its_group() -> None:
    keys = [f"flash-v2 forward bf16 b1 h16 s{1024 * n} d128" for n in range(1, 7)]
    base = side({key: noisy(1.0, seed=n) for n, key in enumerate(keys)})
    comparison = judged(base, slowed(base, 0.3, keys[:1]), Rules())
    assert of(comparison, keys[0]).verdict == "regression"
    assert of(comparison, "flash-v2 forward").verdict == "pass"


# Power


def test_rounds_too_noisy_to_show_twice_the_margin_are_inconclusive_and_say_what_would_show() -> None:
    finding = of(judged(side({A: noisy(1.0, sd=0.05, seed=1)}), side({A: noisy(1.0, sd=0.05, seed=2)}), Rules()), A)
    assert finding.verdict == "inconclusive"
    assert finding.smallest_effect is not None
    assert finding.smallest_effect > 0.04


def test_a_centre_beyond_the_margin_in_rounds_that_disagree_is_inconclusive() -> None:
    base, new = side({A: [1.0] * 6}), side({A: [1.03, 1.03, 1.03, 1.03, 0.98, 0.95]})
    assert "the rounds disagree" in of(judged(base, new, Rules()), A).reason


# Metrics


def test_throughput_that_falls_is_a_regression_and_is_told_as_a_fall() -> None:
    base = with_tflops(side({A: [1.0] * 3}), lambda key: 5e11)
    new = with_tflops(side({A: [1.25] * 3}), lambda key: 5e11)
    finding = of(judged(base, new, dataclasses.replace(FEW, metric=METRICS["tflops"])), A)
    assert finding.verdict == "regression"
    assert finding.base == pytest.approx(500)
    assert "tflops -20.0 %" in finding.reason
    assert "worse" in finding.reason


def test_memory_needs_no_anchor_and_has_its_own_absolute_margin() -> None:
    rules = dataclasses.replace(FEW, metric=METRICS["memory"])
    base = side({A: rounds([1.0] * 3, peak_bytes=100 * 2**20), B: rounds([1.0] * 3, peak_bytes=2**20)})
    new = side({A: rounds([1.0] * 3, peak_bytes=120 * 2**20), B: rounds([1.0] * 3, peak_bytes=1.5 * 2**20)})
    comparison = judged(base, new, rules, "stored")
    assert of(comparison, A).verdict == "regression"
    assert of(comparison, B).verdict == "pass"
    assert comparison.notes == ()


# Laws

times = st.lists(st.floats(0.05, 50.0), min_size=6, max_size=6)
OPPOSITE = {"regression": "improvement", "improvement": "regression"}


@given(base=times, new=times, margin=st.floats(0.001, 0.3))
@settings(max_examples=200)
def test_swapping_the_sides_swaps_regression_and_improvement_and_nothing_else(
    base: list[float], new: list[float], margin: float
) -> None:
    rules = Rules(margin=margin, stored_margin=margin)
    for pairing in ("paired", "stored"):
        there = of(judged(side({A: base}), side({A: new}), rules, pairing), A)
        back = of(judged(side({A: new}), side({A: base}), rules, pairing), A)
        assert there.shift is not None
        assert back.shift == pytest.approx(-there.shift)
        assert (back.verdict in OPPOSITE) == (there.verdict in OPPOSITE)
        if there.verdict in OPPOSITE:
            assert back.verdict == OPPOSITE[there.verdict]


@given(base=times, new=times, margins=st.tuples(st.floats(0.001, 0.5), st.floats(0.001, 0.5)))
@settings(max_examples=200)
def test_a_wider_margin_never_makes_a_regression(
    base: list[float], new: list[float], margins: tuple[float, float]
) -> None:
    narrow, wide = (Rules(margin=margin, stored_margin=margin, unanchored_margin=0) for margin in sorted(margins))
    for pairing in ("paired", "stored"):
        if of(judged(side({A: base}), side({A: new}), wide, pairing), A).verdict == "regression":
            assert of(judged(side({A: base}), side({A: new}), narrow, pairing), A).verdict == "regression"


@given(values=times, pairing=st.sampled_from(["paired", "stored"]))
def test_identical_sides_are_never_flagged(values: list[float], pairing: Any) -> None:
    both = side({A: values})
    assert (
        screen(both, both, Rules(margin=0, stored_margin=0, unanchored_margin=0, margin_abs=0), pairing).to_confirm
        == ()
    )


def test_when_several_codes_apply_4_goes_before_1_before_3_before_0() -> None:
    number = {"p": 0.5, "shift": 0.0}
    asks = {
        4: Finding("a", "failed", "crashed"),
        1: Finding("b", "regression", "slower", p=0.0, shift=0.1),
        3: Finding("c", "missing", "gone"),
        0: Finding("d", "pass", **number),  # type: ignore[arg-type]
    }
    for size in range(1, 5):
        for chosen in itertools.combinations(asks, size):
            cases = tuple(asks[wanted] for wanted in chosen)
            expected = next(wanted for wanted in (4, 1, 3, 0) if wanted in chosen)
            assert outcome(Comparison(cases, (), Rules(), "paired"))[0] == expected


def test_a_verdict_that_fail_on_does_not_list_has_no_code() -> None:
    rules = Rules(fail_on=frozenset())
    fine = Finding("d", "pass", p=0.5, shift=0.0)
    for verdict in ("failed", "regression", "missing", "inconclusive", "new", "cleared", "improvement"):
        finding = Finding("a", verdict, "why")  # type: ignore[arg-type]
        assert outcome(Comparison((finding, fine), (), rules, "paired"))[0] == 0
    for verdict in ("unlike machine", "no baseline"):
        finding = Finding("a", verdict, "why")  # type: ignore[arg-type]
        assert outcome(Comparison((finding, fine), (), rules, "paired"))[0] == 3


def test_the_screening_alone_concludes_what_it_flagged_but_cannot_support_as_inconclusive() -> None:
    keys = [f"flash-v2 forward bf16 b1 h16 s{1024 * n} d128" for n in range(1, 41)]
    base = side({key: [1.0] * 6 for key in keys})
    new = side({key: [1.0] * 6 for key in keys[1:]} | {keys[0]: [1.05, 1.04, 1.06, 1.0, 1.0, 1.05]})
    first = screen(base, new, Rules(), "paired")
    assert first.to_confirm == (keys[0],)
    assert of(conclude(first), keys[0]).verdict == "inconclusive"
