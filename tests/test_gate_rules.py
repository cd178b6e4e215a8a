"""From the `gate:` block of a configuration to the rules of a comparison."""

from __future__ import annotations

import itertools

import pytest

from flashbench.analysis.gate.rules import METRICS, Margins, Rules, rules_from_config, turns
from flashbench.config.schema import Gate
from flashbench.errors import UsageError

KEY = "flash-v2 backward bf16 b1 h16 s1024 d128"


def test_the_defaults_of_a_configuration_are_those_whose_error_rates_are_documented() -> None:
    assert rules_from_config(Gate()) == Rules(margin_abs=1e-3)
    assert rules_from_config(Gate()).margins(KEY) == Rules().margins(KEY)


def test_every_setting_of_the_block_arrives() -> None:
    gate = Gate.model_validate(
        {
            "margin": "1%",
            "stored_margin": "4%",
            "floor_us": 5,
            "overrides": {"flash-v2 *": {"margin": "3%", "floor_us": 2}, "* backward *": {"stored_margin": "9%"}},
            "fail_on": ["regression", "inconclusive"],
            "allow_missing": True,
            "min_cases": 7,
        }
    )
    rules = rules_from_config(gate)
    assert rules.margins("naive forward fp32 b1 h1 s1 d64") == Margins(0.01, 0.04, 0.005)
    assert rules.margins(KEY) == Margins(0.03, 0.09, 0.002)
    assert rules.fail_on == {"regression", "inconclusive"}
    assert rules.may_be_missing(KEY)
    assert rules.min_cases == 7


def test_a_floor_in_microseconds_is_no_floor_of_another_metric() -> None:
    gate = Gate.model_validate({"floor_us": 5, "overrides": {"*": {"floor_us": 7}}})
    assert rules_from_config(gate, "memory").margins(KEY).absolute == METRICS["memory"].margin_abs


def test_the_rules_agree_with_the_configuration_about_every_case() -> None:
    gate = Gate.model_validate(
        {"overrides": {"*": {"margin": "3%"}, "* s1024 *": {"margin": "4%", "stored_margin": "6%"}}}
    )
    for key in (KEY, "naive forward fp32 b1 h1 s1 d64"):
        theirs, ours = gate.limits_for(key), rules_from_config(gate).margins(key)
        assert (ours.paired, ours.stored, ours.absolute * 1e3) == pytest.approx(tuple(theirs))


def test_rules_narrowed_to_some_cases_keep_only_the_globs_that_match_them() -> None:
    rules = Rules(
        overrides={"flash-v2 *": {"margin": 0.1}, "naive *": {"margin": 0.2}}, allow_missing=("naive *", "*d128")
    )
    narrow = rules.narrowed([KEY])
    assert list(narrow.overrides) == ["flash-v2 *"]
    assert narrow.allow_missing == ("*d128",)
    narrow.check_globs([KEY])


def test_an_unknown_metric_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UsageError, match="unknown metric 'tflop'; did you mean 'tflops'"):
        rules_from_config(Gate(), "tflop")


def test_a_steady_drift_falls_on_both_sides_alike() -> None:
    order = list(itertools.chain.from_iterable(turns(number) for number in range(6)))
    places = {name: [i for i, ran in enumerate(order) if ran == name] for name in ("base", "new")}
    assert sum(places["base"]) == sum(places["new"])
