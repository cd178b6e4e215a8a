"""What a configuration means: files, merging, axes and the cases they make. Refusals are in test_config_errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashbench.config import scalars, source
from flashbench.config.axes import Expansion, expand
from flashbench.config.load import load, validate
from flashbench.config.scalars import Pair
from flashbench.config.schema import Config, Limits, json_schema
from flashbench.records import Problem

ROOT = Path(__file__).parent.parent
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))

SMALL = """\
providers: [naive, sdpa]
problems:
  dtype: bf16
  seq_len: [512, 1k]
  head_dim: 64
  heads: 8
"""


def config(text: str) -> Config:
    return validate(source.parse(text.encode(), "test.yaml"))


def axes(text: str, providers: str = "[naive]") -> list[Problem]:
    """The problems of a sweep given as the lines of its `problems` block."""
    block = "".join(f"  {line.strip()}\n" for line in text.strip().splitlines())
    return [case.problem for case in expand(config(f"providers: {providers}\nproblems:\n{block}")).cases]


def keys(expansion: Expansion) -> list[str]:
    return [case.key for case in expansion.cases]


def test_cases_go_by_problem_and_then_by_provider_in_the_order_of_the_file():
    assert keys(expand(config(SMALL))) == [
        "naive forward bf16 b1 h8 s512 d64",
        "sdpa forward bf16 b1 h8 s512 d64",
        "naive forward bf16 b1 h8 s1024 d64",
        "sdpa forward bf16 b1 h8 s1024 d64",
    ]


def test_a_scalar_means_a_list_of_one():
    assert (
        config(SMALL).resolved() == config(SMALL.replace("bf16", "[bf16]").replace("heads: 8", "heads: [8]")).resolved()
    )


def test_mode_mask_and_batch_have_defaults():
    problem = expand(config(SMALL)).cases[0].problem
    assert (problem.mode, problem.mask, problem.batch) == ("forward", "none", 1)


def test_tokens_give_the_batch_of_each_length_and_at_least_one():
    problems = axes("dtype: bf16\nseq_len: [4k, 16k, 32k]\nhead_dim: 64\nheads: 8\ntokens: 16k")
    assert [p.batch for p in problems] == [4, 1, 1]


def test_tokens_count_the_longer_of_query_and_kv_length():
    assert axes("dtype: bf16\nseq_len: 1k/4k\nhead_dim: 64\nheads: 8\ntokens: 16k")[0].batch == 4


def test_hidden_gives_the_heads_of_each_head_dim():
    problems = axes("dtype: bf16\nseq_len: 1k\nhead_dim: [64, 128, 256]\nhidden: 2048")
    assert [p.heads_q for p in problems] == [32, 16, 8]
    assert all(p.heads_q == p.heads_kv for p in problems)


def test_pairs_set_heads_head_dims_and_lengths_apart():
    (problem,) = axes("dtype: bf16\nseq_len: 128/256\nhead_dim: 192/128\nheads: 32/8")
    assert problem.label == "forward bf16 b1 h32/8 s128/256 d192/128"


def test_query_and_kv_lengths_multiply_when_given_apart():
    """IO-08: a product of a list of one and a list of two is two cases."""
    problems = axes("dtype: bf16\nseq_q: [1]\nseq_kv: [1k, 8k]\nhead_dim: 64\nheads: 8")
    assert [(p.seq_q, p.seq_kv) for p in problems] == [(1, 1024), (1, 8192)]


def test_pairs_of_lengths_run_along_both_at_once():
    """IO-08: the zip of [128, 256] and [256, 512] is two cases; lists of unequal length cannot be written."""
    problems = axes("dtype: bf16\nseq_len: [128/256, 256/512]\nhead_dim: 64\nheads: 8")
    assert [(p.seq_q, p.seq_kv) for p in problems] == [(128, 256), (256, 512)]


def test_a_single_length_in_decode_is_the_number_of_keys_of_one_query():
    problems = axes("mode: [forward, decode]\ndtype: bf16\nseq_len: [4k, 4/8k]\nhead_dim: 64\nheads: 8")
    assert [(p.mode, p.seq_q, p.seq_kv) for p in problems] == [
        ("forward", 4096, 4096),
        ("forward", 4, 8192),
        ("decode", 1, 4096),
        ("decode", 4, 8192),
    ]


def test_page_size_is_an_axis_and_absent_by_default():
    assert [p.page_size for p in axes("dtype: bf16\nseq_len: 1k\nhead_dim: 64\nheads: 8\npage_size: [16, 64]")] == [
        16,
        64,
    ]
    assert [p.page_size for p in axes("dtype: bf16\nseq_len: 1k\nhead_dim: 64\nheads: 8")] == [None]


def test_cases_that_come_out_twice_are_kept_once_in_their_first_place():
    text = (
        SMALL.replace("[512, 1k]", "[1k, 512, 1024]")
        + "include: [{dtype: bf16, seq_len: 512, head_dim: 64, heads: 8}]\n"
    )
    assert [case.problem.seq_q for case in expand(config(text)).cases] == [1024, 1024, 512, 512]


@pytest.mark.parametrize(
    ("exclusion", "left"),
    [
        ("{seq_len: 512}", ["naive s1024", "sdpa s1024"]),
        ("{provider: sdpa, seq_len: [512, 2k]}", ["naive s512", "naive s1024", "sdpa s1024"]),
        ("{heads: 8, head_dim: 64, provider: naive}", ["sdpa s512", "sdpa s1024"]),
        ("{seq_q: 1k, heads_kv: 8, batch: 1, mask: none, head_dim_v: 64}", ["naive s512", "sdpa s512"]),
        ("{heads: 8/4}", ["naive s512", "sdpa s512", "naive s1024", "sdpa s1024"]),
    ],
)
def test_an_exclusion_takes_the_cases_that_match_all_of_its_keys(exclusion: str, left: list[str]):
    cases = expand(config(SMALL + f"exclude: [{exclusion}]\n")).cases
    assert [f"{case.provider} s{case.problem.seq_q}" for case in cases] == left


def test_an_excluded_length_means_in_decode_what_it_means_as_an_axis():
    text = SMALL.replace("dtype", "mode: decode\n  dtype") + "exclude: [{seq_len: 512}]\n"
    assert {case.problem.seq_kv for case in expand(config(text)).cases} == {1024}


def test_an_exclusion_that_matches_nothing_is_noted_with_its_line():
    (note,) = expand(config(SMALL + "exclude:\n  - {seq_len: 512}\n  - {dtype: fp16}\n")).notes
    assert note == "test.yaml:9: exclude[1]: matches no case"


def test_an_included_block_adds_its_own_product_for_its_own_providers():
    text = SMALL + "exclude: [{dtype: bf16, seq_len: 512}]\n"
    text += "include: [{dtype: bf16, seq_len: [512, 128k], head_dim: 64, heads: 8, providers: sdpa}]\n"
    assert keys(expand(config(text)))[2:] == ["sdpa forward bf16 b1 h8 s512 d64", "sdpa forward bf16 b1 h8 s131072 d64"]


def test_include_alone_is_a_sweep():
    text = "providers: [naive]\ninclude: [{dtype: bf16, seq_len: 1k, head_dim: 64, heads: 8}]\n"
    assert keys(expand(config(text))) == ["naive forward bf16 b1 h8 s1024 d64"]


def test_a_kernel_file_passes_where_names_of_providers_are_checked():
    text = SMALL.replace("[naive, sdpa]", "[naive, my/kernel.py:attention]")
    assert {case.provider for case in expand(config(text), ["naive"]).cases} == {"naive", "my/kernel.py:attention"}


def test_numbers_are_read_as_yaml_1_2_reads_them():
    """CF-01: for YAML 1.1 every one of these fractions is text."""
    gate = config(SMALL + "gate: {margin: 5e-2, stored_margin: 1.0e-1, floor_us: 1e3}\n").gate
    assert (gate.margin, gate.stored_margin, gate.floor_us) == (0.05, 0.1, 1000.0)


def test_words_that_were_truth_values_in_yaml_1_1_are_names():
    """CF-03: `off`, `on`, `no`, `y` and a sexagesimal number stay the text that was written."""
    text = SMALL.replace("[naive, sdpa]", "[off, on, no, y, 12:30]")
    assert config(text).providers == ("off", "on", "no", "y", "12:30")


def test_merge_keys_work_and_a_key_beside_them_wins():
    """CF-04: only a key written twice in one mapping is refused."""
    text = (
        SMALL
        + "include:\n  - &long {dtype: bf16, seq_len: 32k, head_dim: 64, heads: 8}\n  - {<<: *long, seq_len: 64k}\n"
    )
    assert [block.seq_len for block in config(text).include] == [(Pair(32768, 32768),), (Pair(65536, 65536),)]


@pytest.mark.parametrize(("text", "value"), [("2%", 0.02), ("0.5%", 0.005), ("0.02", 0.02), ("0", 0.0), ("250%", 2.5)])
def test_a_fraction_is_a_percentage_or_a_number_below_one(text: str, value: float):
    assert config(SMALL + f"gate: {{margin: {text}}}\n").gate.margin == pytest.approx(value, rel=1e-12)


def test_a_gate_has_six_rounds_and_a_sweep_one_unless_the_file_says():
    assert (config(SMALL).measure.round_count(), config(SMALL).measure.round_count(gate=True)) == (1, 6)
    assert config(SMALL + "measure: {rounds: 3}\n").measure.round_count(gate=True) == 3


def test_limits_of_a_case_come_from_the_last_override_that_matches():
    text = SMALL + 'gate: {margin: 2%, overrides: {"sdpa *": {margin: 4%, floor_us: 3}, "* s1024 *": {margin: 200%}}}\n'
    gate = config(text).gate
    assert gate.limits_for("naive forward bf16 b1 h8 s512 d64") == Limits(0.02, 0.05, 1.0)
    assert gate.limits_for("sdpa forward bf16 b1 h8 s512 d64") == Limits(0.04, 0.05, 3.0)
    assert gate.limits_for("sdpa forward bf16 b1 h8 s1024 d64") == Limits(2.0, 0.05, 3.0)


def test_a_base_file_is_merged_key_by_key_and_its_lists_are_replaced(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "base.yaml").write_text(SMALL + "measure: {l2: cold, seed: 7}\n")
    (tmp_path / "sub" / "middle.yaml").write_text("extends: ../base.yaml\nmeasure: {seed: 8}\n")
    (tmp_path / "top.yaml").write_text("extends: sub/middle.yaml\nproblems: {seq_len: [2k]}\nmeasure: {rounds: 2}\n")
    top = load(tmp_path / "top.yaml")
    assert top.problems is not None
    assert top.problems.seq_len == (Pair(2048, 2048),)
    assert (top.providers, top.problems.dtype) == (("naive", "sdpa"), ("bf16",))
    assert (top.measure.l2, top.measure.seed, top.measure.rounds) == ("cold", 8, 2)


def test_a_file_replaces_the_other_way_of_saying_the_same_in_its_base(tmp_path: Path):
    (tmp_path / "base.yaml").write_text(SMALL + "  tokens: 16k\n")
    (tmp_path / "top.yaml").write_text("extends: base.yaml\nproblems: {batch: 3, hidden: 512, seq_q: 1, seq_kv: 64}\n")
    assert keys(expand(load(tmp_path / "top.yaml")))[0] == "naive forward bf16 b3 h8 s1/64 d64"


def test_a_configuration_is_named_after_its_file_unless_it_says(tmp_path: Path):
    (tmp_path / "my sweep.yaml").write_text(SMALL)
    (tmp_path / "b.yaml").write_text("name: nightly\n" + SMALL)
    assert (load(tmp_path / "my sweep.yaml").name, load(tmp_path / "b.yaml").name) == ("my-sweep", "nightly")


def test_lists_on_the_command_line_replace_those_of_the_file(tmp_path: Path):
    (tmp_path / "a.yaml").write_text(SMALL)
    overridden = load(
        tmp_path / "a.yaml",
        {
            "provider": "sdpa, k.py:f",
            "seq_len": "128,2k/4k",
            "mask": "causal,window:64",
            "device": "cuda:1",
            "l2": "warm",
        },
    )
    assert (overridden.device, overridden.measure.l2) == ("cuda:1", "warm")
    assert keys(expand(overridden, ["sdpa"]))[:3] == [
        "sdpa forward bf16 b1 h8 s128 d64 causal",
        "k.py:f forward bf16 b1 h8 s128 d64 causal",
        "sdpa forward bf16 b1 h8 s2048/4096 d64 causal",
    ]


def test_an_option_replaces_the_other_way_of_saying_the_same_in_the_file(tmp_path: Path):
    (tmp_path / "a.yaml").write_text(SMALL + "  batch: 2\n")
    overridden = load(tmp_path / "a.yaml", {"tokens": "4k", "hidden": "256", "head_dim": None})
    assert keys(expand(overridden))[0] == "naive forward bf16 b8 h4 s512 d64"


INCLUDING = SMALL + "include: [{dtype: bf16, seq_len: 8k, head_dim: 64, heads: 8, providers: [sdpa]}]\n"


def test_replaced_axes_drop_what_the_file_includes_and_say_so(tmp_path: Path):
    (tmp_path / "a.yaml").write_text(INCLUDING)
    expansion = expand(load(tmp_path / "a.yaml", {"seq_len": "128"}))
    assert {case.problem.seq_q for case in expansion.cases} == {128}
    assert expansion.notes == ("'include' is left out, because --seq-len replaces an axis of the sweep",)


def test_replaced_providers_never_run_another_one_that_the_file_includes(tmp_path: Path):
    (tmp_path / "a.yaml").write_text(INCLUDING)
    without = expand(load(tmp_path / "a.yaml", {"provider": "naive"}))
    assert {case.provider for case in without.cases} == {"naive"}
    assert len(without.cases) == 2
    assert "--provider names none of its providers" in without.notes[0]
    assert len(expand(load(tmp_path / "a.yaml", {"provider": "sdpa"})).cases) == 3


@pytest.mark.parametrize("options", [{"provider": "naive"}, {"seq_len": "256"}])
def test_what_a_narrowed_sweep_no_longer_matches_is_no_fault_of_the_file(tmp_path: Path, options: dict[str, str]):
    (tmp_path / "a.yaml").write_text(
        SMALL + 'exclude: [{seq_len: 1k, provider: sdpa}]\ngate: {overrides: {"sdpa * s1024 *": {margin: 3%}}}\n'
    )
    assert expand(load(tmp_path / "a.yaml", options)).notes == ()


def test_resolved_is_plain_data_that_reads_as_the_same_configuration(tmp_path: Path):
    text = (
        INCLUDING
        + 'exclude: [{head_dim: 192/128}]\nmeasure: {rounds: 2}\ngate: {margin: 150%, overrides: {"naive *": {margin: 3%}}}\n'
    )
    first = config(text).resolved()
    again = config(json.dumps(first)).resolved()
    assert again == first
    assert (first["problems"]["seq_len"], first["exclude"][0]["head_dim"]) == ([512, 1024], ["192/128"])
    assert (first["measure"]["timeout_seconds"], first["gate"]["margin"]) == (120.0, "150%")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_configuration_makes_cases_without_a_note(path: Path):
    expansion = expand(load(path))
    assert expansion.cases
    assert expansion.notes == ()
    assert path.read_text().startswith("#")


def test_the_forward_sweep_holds_the_long_sequence_and_one_head_dim_in_fp16():
    problems = {case.problem for case in expand(load(ROOT / "configs" / "forward.yaml")).cases}
    assert len(problems) == 49
    assert {p.head_dim for p in problems if p.dtype == "fp16"} == {128}
    assert max(p.seq_q for p in problems) == 128 * 1024


def test_the_sweep_without_a_file_takes_well_under_a_minute_of_sampling_on_a_cpu():
    default = load(kind="cpu")
    assert len(expand(default).cases) * default.measure.max_seconds < 30
    assert (default.device, default.measure.l2) == ("cpu", "warm")


def test_the_sweep_without_a_file_keeps_tokens_and_width_on_a_gpu():
    problems = {case.problem for case in expand(load(kind="cuda")).cases}
    assert {(p.batch * p.seq_q, p.heads_q * p.head_dim) for p in problems} == {(16384, 2048)}


def test_the_json_schema_describes_every_key_and_forbids_others():
    schema = json_schema()
    assert set(schema["properties"]) == set(Config.model_fields)
    blocks = [schema, *schema["$defs"].values()]
    assert all(block["additionalProperties"] is False for block in blocks)
    assert "required" not in schema
    assert "zip" in schema["$defs"]["Axes"]["properties"]["seq_len"]["description"]


def test_cases_can_be_expanded_where_neither_pydantic_nor_yaml_was_imported():
    code = "import sys, flashbench.config.axes; print([m for m in ('pydantic', 'ruamel.yaml', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@given(st.integers(1, 10**9))
def test_a_length_reads_the_same_as_number_as_text_and_in_k(n: int):
    assert scalars.length(n) == scalars.length(str(n)) == n
    assert scalars.length(f"{n}k") == 1024 * n


@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_a_pair_reads_back_as_it_is_written(first: int, second: int):
    pair = Pair(first, second)
    assert scalars.pair(pair.plain()) == pair
    assert scalars.pair(f"{first}/{second}") == pair


@given(st.text(max_size=12))
def test_a_length_is_digits_with_or_without_k_and_nothing_else(text: str):
    try:
        value = scalars.length(text)
    except ValueError:
        return
    assert text in (str(value), f"{value // 1024}k")
