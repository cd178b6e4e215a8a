"""What the gate's commands say and with which exit code, on runs that were written here; and the first steps of the real ones."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from stored_runs import H200, H200_ID, A, B, C, steady, write_run

from flashbench.cli import main
from flashbench.records import Case, from_plain, to_plain
from flashbench.run.injection import Injection
from flashbench.store.baseline import Baseline, read_baseline, write_baseline
from flashbench.store.read import load_rows
from flashbench.store.side import Identity, Observation, Side


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """What a reader of a CI log sees first."""
        return (self.out or self.err).splitlines()[0]


Flashbench = Callable[..., Done]


@pytest.fixture
def flashbench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache_home: Path
) -> Flashbench:
    """The console script in this process, in a folder of its own and outside any CI."""

    def run(*arguments: object, **environment: str) -> Done:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))
        for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["flashbench", *map(str, arguments)])
        try:
            main.run()
            code: Any = 0
        except SystemExit as ended:
            code = ended.code or 0
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return Done(int(code), out, err)

    return run


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_run(tmp_path / "base", {A: steady(1.0), B: steady(2.0, seed=1)})


def another(tmp_path: Path, cases: Mapping[str, Any] | None = None, **facts: Any) -> Path:
    usual = {A: steady(1.0, seed=2), B: steady(2.0, seed=3)}
    return write_run(tmp_path / "new", usual if cases is None else cases, **facts)


class TestCompare:
    def test_two_runs_of_the_same_code_pass(self, flashbench: Flashbench, base: Path, tmp_path: Path) -> None:
        done = flashbench("compare", base, another(tmp_path))
        assert done.code == 0
        assert done.line.startswith("no regression in 2 judged cases (2 pass)")

    def test_a_slowdown_is_code_1_with_both_values_and_the_change(self, flashbench, base: Path, tmp_path: Path) -> None:
        done = flashbench("compare", base, another(tmp_path, {A: steady(1.15), B: steady(2.0, seed=3)}))
        assert done.code == 1
        assert done.line.startswith(f"regression: 1 case, the worst: {A}: time +15.")
        assert "from 1 to 1.15 ms" in done.line

    def test_a_speed_up_passes_and_is_called_one(self, flashbench, base: Path, tmp_path: Path) -> None:
        done = flashbench("compare", base, another(tmp_path, {A: steady(0.1), B: steady(2.0, seed=3)}))
        assert done.code == 0
        assert "1 improvement" in done.line

    def test_fresh_rounds_in_the_run_confirm_what_the_first_flagged(
        self, flashbench, base: Path, tmp_path: Path
    ) -> None:
        run = another(tmp_path, {A: [*steady(1.15), *steady(1.15, 12, seed=5)], B: steady(2.0, seed=3)})
        _edit_header(run, gate={"screening_rounds": 6})
        done = flashbench("compare", base, run)
        assert done.code == 1
        assert "12 fresh" in done.out, "not the base's six, which are no fresh rounds"

    def test_fresh_rounds_in_the_run_clear_what_the_first_flagged(self, flashbench, base: Path, tmp_path: Path) -> None:
        run = another(tmp_path, {A: [*steady(1.15), *steady(1.0, 12, seed=5)], B: steady(2.0, seed=3)})
        _edit_header(run, gate={"screening_rounds": 6})
        done = flashbench("compare", base, run)
        assert done.code == 0
        assert "1 cleared" in done.line

    @pytest.mark.parametrize(
        ("stages", "words"),
        [
            ({"screening_rounds": 6}, "7 of 12 fresh rounds are there, and these alone decide"),
            ({"screening_rounds": 6, "confirm_rounds": 7}, None),
            ({}, None),
        ],
        ids=["cut off", "as many as were asked for", "a run without stages"],
    )
    def test_a_confirmation_that_was_cut_off_is_judged_by_what_is_there_and_told(
        self, flashbench, tmp_path: Path, stages: dict[str, int], words: str | None
    ) -> None:
        plain = [*steady(1.0), *steady(1.0, 8, seed=5)]
        pair = {"pair": "one", "anchors": False}
        first = write_run(tmp_path / "a", {A: plain, B: steady(2.0)}, **pair)
        second = write_run(tmp_path / "b", {A: [1.05 * ms for ms in plain[:-1]], B: steady(2.0)}, **pair)
        _edit_header(second, gate=stages)
        done = flashbench("compare", first, second)
        assert done.code == 1
        notes = [line for line in done.out.splitlines() if line.startswith("note: ")]
        assert notes == ([f"note: the confirmation is not finished: {words}"] if words else [])

    def test_the_two_runs_of_an_ab_are_compared_in_pairs(self, flashbench, tmp_path: Path) -> None:
        # Rounds that swing by 10 % hide 3 % between sessions, and show it between the sides of each round.
        swing = [1.0, 1.1, 0.95, 1.05, 1.12, 0.98]
        pair = {"pair": "one", "anchors": False}
        first = write_run(tmp_path / "a", {A: swing}, **pair)
        second = write_run(tmp_path / "b", {A: [1.03 * ms for ms in swing]}, **pair)
        assert flashbench("compare", first, second).code == 1
        _edit_header(second, pair="another")
        assert flashbench("compare", first, second).code == 0

    def test_a_baselines_file_is_a_base_too(self, flashbench, base: Path, tmp_path: Path) -> None:
        assert flashbench("baseline", "update", base, "--why", "first").code == 0
        (stored,) = (tmp_path / "results").rglob("*.jsonl")
        assert flashbench("compare", stored, another(tmp_path)).code == 0

    def test_a_case_that_is_gone_is_code_3_unless_it_may_be(self, flashbench, base: Path, tmp_path: Path) -> None:
        done = flashbench("compare", base, another(tmp_path, {A: steady(1.0)}))
        assert done.code == 3
        assert done.line.startswith(f"missing: 1 case, the worst: {B}")
        allowed = another(tmp_path, {A: steady(1.0)}, gate={"allow_missing": True})
        assert flashbench("compare", base, allowed).code == 0

    def test_a_case_without_a_base_is_new_and_fails_only_when_asked(
        self, flashbench, base: Path, tmp_path: Path
    ) -> None:
        cases = {A: steady(1.0), B: steady(2.0), C: steady(3.0)}
        done = flashbench("compare", base, another(tmp_path, cases))
        assert done.code == 0
        assert "1 new" in done.line
        strict = another(tmp_path, cases, gate={"fail_on": ["new"]})
        assert flashbench("compare", base, strict).code == 3

    @pytest.mark.parametrize("status", ["incorrect", "invalid", "timeout", "crashed", "error", "oom"])
    def test_a_case_that_was_ok_and_now_fails_is_code_4(
        self, flashbench, base: Path, tmp_path: Path, status: str
    ) -> None:
        done = flashbench("compare", base, another(tmp_path, {A: [(status, "it broke")] * 6, B: steady(2.0)}))
        assert done.code == 4
        assert done.line.startswith(f"failed: 1 case, the worst: {A}: ")
        assert f"{status} in round 0: it broke" in done.line

    @pytest.mark.parametrize("status", ["incorrect", "crashed", "oom"])
    def test_a_case_that_failed_in_the_base_has_nothing_to_be_slower_than(
        self, flashbench, tmp_path: Path, status: str
    ) -> None:
        old = write_run(tmp_path / "base", {A: [(status, "it broke")] * 6, B: steady(2.0)})
        done = flashbench("compare", old, another(tmp_path))
        assert done.code == 0
        assert f"in the base it was {status} in round 0: it broke" in done.out

    def test_a_case_that_fails_on_both_sides_fails(self, flashbench, tmp_path: Path) -> None:
        cases = {A: [("crashed", "gone")] * 6, B: steady(2.0)}
        assert flashbench("compare", write_run(tmp_path / "base", cases), another(tmp_path, cases)).code == 4

    def test_a_zero_in_the_base_is_an_invalid_baseline(self, flashbench, tmp_path: Path) -> None:
        old = write_run(tmp_path / "base", {A: [0.0] * 6, B: steady(2.0)})
        done = flashbench("compare", old, another(tmp_path))
        assert done.code == 3
        assert "baseline invalid: 0 ms in round 0" in done.line

    def test_samples_that_are_not_numbers_are_no_times(self, flashbench, base: Path, tmp_path: Path) -> None:
        import numpy as np

        file = base / "samples.f32"
        samples = np.fromfile(file, dtype="<f4")
        samples[:5] = np.nan
        samples.tofile(file)
        done = flashbench("compare", base, another(tmp_path))
        assert done.code == 3
        assert "baseline invalid: no time in round 0" in done.line

    def test_rows_of_an_older_schema_are_read(self, flashbench, base: Path, tmp_path: Path) -> None:
        _edit_header(base, schema_version=0, cases=None, config=None)
        rows = [json.loads(line) for line in (base / "rows.jsonl").read_text().splitlines()]
        for row in rows:
            del row["state"], row["memory"], row["check"]
            row["timing"] = {"method": "events"}
        (base / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert flashbench("compare", base, another(tmp_path)).code == 0

    def test_a_newer_schema_is_refused_with_what_to_do(self, flashbench, base: Path, tmp_path: Path) -> None:
        _edit_header(base, schema_version=99)
        done = flashbench("compare", base, another(tmp_path))
        assert done.code == 3
        assert "schema 99" in done.line

    def test_a_damaged_row_is_refused_with_its_line(self, flashbench, base: Path, tmp_path: Path) -> None:
        rows = base / "rows.jsonl"
        rows.write_text(rows.read_text().replace('{"key"', '{key"', 1))
        done = flashbench("compare", base, another(tmp_path))
        assert done.code == 3
        assert "rows.jsonl:1" in done.line

    def test_too_few_rounds_are_no_verdict(self, flashbench, base: Path, tmp_path: Path) -> None:
        done = flashbench("compare", base, another(tmp_path, {A: steady(1.0, 2), B: steady(2.0, 2)}))
        assert done.code == 3
        assert "too few rounds: 2, at least 5 are needed" in done.line

    def test_one_side_throttled_by_heat_is_inconclusive(self, flashbench, base: Path, tmp_path: Path) -> None:
        hot = {"throttled": ("hardware thermal slowdown",)}
        slow = {A: steady(1.15), B: steady(2.3)}
        done = flashbench("compare", base, another(tmp_path, slow, **hot))
        assert done.code == 3, "not one case could be judged"
        assert (
            "throttled in 0 of 6 rounds of the base and 6 of 6 of the new side (hardware thermal slowdown)" in done.out
        )
        assert done.line.startswith(
            f"only 0 of 2 cases in common could be judged, at least 1 must be; {A}: throttled in "
        )
        strict = another(tmp_path, slow, gate={"fail_on": ["inconclusive"]}, **hot)
        assert "inconclusive: 2 cases" in flashbench("compare", base, strict).line

    def test_a_throttled_case_beside_one_that_was_judged_is_no_verdict_on_it_alone(
        self, flashbench, base: Path, tmp_path: Path
    ) -> None:
        cases = {A: steady(1.15), B: steady(2.0, seed=3)}
        new = another(tmp_path, cases, throttled={A: ("hardware thermal slowdown",)})
        done = flashbench("compare", base, new)
        assert done.code == 0
        assert done.line.startswith("no regression in 1 judged cases (1 inconclusive, 1 pass)")
        _edit_header(new, config={"gate": {"min_cases": 2}})
        done = flashbench("compare", base, new)
        assert done.code == 3
        assert done.line.startswith(
            f"only 1 of 2 cases in common could be judged, at least 2 must be; {A}: throttled in "
        )

    def test_the_software_power_cap_alone_is_no_reason(self, flashbench, base: Path, tmp_path: Path) -> None:
        assert flashbench("compare", base, another(tmp_path, throttled=("software power cap",))).code == 0

    def test_another_gpu_is_no_base(self, flashbench, base: Path, tmp_path: Path) -> None:
        a100 = replace(H200, name="NVIDIA A100 80GB PCIe", capability=(8, 0), power_limit_w=300.0)
        done = flashbench("compare", base, another(tmp_path, device=a100, device_id="a100-pcie-80gb"))
        assert done.code == 3
        assert "device h200-sxm-141gb against a100-pcie-80gb" in done.line

    def test_nothing_in_common_is_no_verdict(self, flashbench, base: Path, tmp_path: Path) -> None:
        done = flashbench("compare", base, another(tmp_path, {C: steady(3.0)}, gate={"fail_on": ["regression"]}))
        assert done.code == 3
        assert done.line.startswith("no case in common between the two sides")

    def test_a_subset_in_another_order_is_matched_by_key(self, flashbench, tmp_path: Path) -> None:
        # GA-11: positional matching finds none of them.
        keys = [f"naive forward fp32 b1 h2 s{16 * i} d32" for i in range(1, 13)]
        old = write_run(tmp_path / "base", {key: steady(1.0 + i) for i, key in enumerate(keys)})
        new = another(tmp_path, {keys[7]: steady(8.0), keys[2]: steady(3.0)})
        done = flashbench("compare", old, new)
        assert done.code == 3
        assert "missing: 10 cases" in done.line
        assert done.out.count("\npass ") == 2

    def test_a_path_without_a_run_says_so(self, flashbench, base: Path, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        assert flashbench("compare", base, "nowhere").code == 2
        done = flashbench("compare", base, "empty")
        assert (done.code, "no run in 'empty'" in done.line) == (3, True)

    def test_a_glob_that_matches_nothing_is_code_2(self, flashbench, base: Path, tmp_path: Path) -> None:
        config = _config(tmp_path, gate='{overrides: {"sdpa-flsh *": {margin: 4%}}}')
        done = flashbench("compare", base, another(tmp_path), "--config", config)
        assert done.code == 2
        assert "'sdpa-flsh *' matches no case" in done.line

    def test_memory_is_judged_beside_time_when_asked(self, flashbench, base: Path, tmp_path: Path) -> None:
        new = another(tmp_path, gate={"metrics": ["time", "memory"]}, peak_bytes=80 << 20)
        done = flashbench("compare", base, new, "--junit", "out.xml", "--json", "out.json")
        assert done.code == 1
        report = json.loads((tmp_path / "out.json").read_text())
        assert [one["exit_code"] for one in report["comparisons"]] == [0, 1]
        suites = ET.parse(tmp_path / "out.xml").getroot()
        assert [suite.get("failures") for suite in suites] == ["0", "2"]

    def test_one_failed_case_breaks_no_other_command(self, flashbench, tmp_path: Path) -> None:
        # GA-13.
        run = another(tmp_path, {A: steady(1.0), B: steady(2.0), C: [("error", "ValueError: no")] * 6})
        shown = flashbench("show", run, "--format", "csv")
        assert shown.code == 0
        assert "ValueError: no" in shown.out
        assert flashbench("compare", run, run).code == 4

    def test_it_imports_no_torch(self, base: Path, tmp_path: Path) -> None:
        new = another(tmp_path)
        code = (
            "import sys\nfrom flashbench.cli import main\n"
            f"sys.argv = ['flashbench', 'compare', {str(base)!r}, {str(new)!r}]\n"
            "try:\n    main.run()\nexcept SystemExit as done:\n    print('torch' in sys.modules, done.code)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.splitlines()[-1] == "False 0"


RESULTS = Path(__file__).parents[1] / "results"
RECORDED = RESULTS / "reference" / H200_ID
SELF_TESTS = sorted(path.name.partition("-")[0] for path in RECORDED.glob("*-self-test-base"))


class TestRecordsOfAnH200:
    """What docs/gate.md says of a real GPU can be said again from the runs that are kept."""

    def test_the_recorded_gate_passes_on_the_kept_baseline(self, flashbench) -> None:
        done = flashbench("compare", RESULTS / "baselines" / H200_ID / "ci.jsonl", RECORDED / "20261130T010953Z-ci")
        assert done.code == 0
        assert done.line.startswith("no regression in 30 judged cases (30 pass)")
        assert done.err == ""

    def test_every_live_self_test_is_a_line_of_the_table(self) -> None:
        page = (RESULTS.parent / "docs" / "gate.md").read_text()
        assert re.findall(r"^\| `(\d+T\d+Z)` \|", page, re.MULTILINE) == SELF_TESTS

    @pytest.mark.parametrize("stamp", SELF_TESTS)
    def test_a_live_self_test_shows_both_slowdowns_and_no_other(self, flashbench, tmp_path: Path, stamp: str) -> None:
        base, new = (RECORDED / f"{stamp}-self-test-{side}" for side in ("base", "new"))
        assert flashbench("compare", base, new, "--json", "o.json").code == 1
        (found,) = json.loads((tmp_path / "o.json").read_text())["comparisons"]
        injections = json.loads((base / "run.json").read_text())["injections"]
        slowed = {from_plain(Case, injection["case"]).key for injection in injections}
        assert {case["key"] for case in found["cases"] if case["verdict"] == "regression"} == slowed
        assert {case["rounds"] for case in found["cases"] if case["key"] in slowed} == {12}
        assert found["counts"] == {"regression": 2, "pass": 8}
        assert [group["verdict"] for group in found["groups"]] == ["pass"]


class TestReports:
    def test_files_hold_the_same_verdicts(self, flashbench, base: Path, tmp_path: Path) -> None:
        new = another(tmp_path, {A: steady(1.15), B: steady(2.0, seed=3)})
        done = flashbench("compare", base, new, "--markdown", "o.md", "--junit", "o.xml", "--json", "o.json")
        assert done.code == 1
        report = json.loads((tmp_path / "o.json").read_text())
        assert report["exit_code"] == 1
        assert report["comparisons"][0]["counts"] == {"regression": 1, "pass": 1}
        suite = ET.parse(tmp_path / "o.xml").getroot()
        assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
        text = (tmp_path / "o.md").read_text()
        assert text.startswith("### flashbench gate: regression (exit code 1)")
        assert f"Again: `flashbench compare {base} {new}" in text

    def test_github_gets_its_summary_and_annotations(self, flashbench, base: Path, tmp_path: Path) -> None:
        new = another(tmp_path, {A: steady(1.15), B: steady(2.0, seed=3)})
        summary = tmp_path / "summary.md"
        summary.write_text("from an earlier command\n")
        done = flashbench("compare", base, new, GITHUB_ACTIONS="true", GITHUB_STEP_SUMMARY=str(summary))
        assert "::error title=regression" in done.out
        assert summary.read_text().startswith("from an earlier command\n### flashbench gate")

    def test_outside_github_there_are_no_annotations(self, flashbench, base: Path, tmp_path: Path) -> None:
        assert "::error" not in flashbench("compare", base, another(tmp_path, {A: steady(1.15)})).out

    def test_a_file_that_cannot_be_written_is_told_before_anything_runs(self, flashbench, base: Path) -> None:
        done = flashbench("compare", base, base, "--json", "no/such/folder.json")
        assert (done.code, "--json" in done.line) == (2, True)


class TestBaseline:
    def stored(self, tmp_path: Path) -> Path:
        return tmp_path / "results" / "baselines" / H200_ID / "ci.jsonl"

    def test_it_says_who_stored_what_and_why(self, flashbench, base: Path, tmp_path: Path) -> None:
        done = flashbench("baseline", "update", base, "--why", "first of this card", "--who", "ada")
        assert done.code == 0
        found = read_baseline(self.stored(tmp_path))
        assert (found.who, found.why, found.run) == ("ada", "first of this card", base.name)
        assert found.side.anchors["gemm"] == dict.fromkeys(range(6), 0.2)
        listed = flashbench("baseline", "show")
        assert "2 cases; stored by ada" in listed.out
        shown = flashbench("baseline", "show", self.stored(tmp_path))
        assert "first of this card" in shown.out
        assert f"{B}  ok" in shown.out

    def test_a_regression_is_refused_until_it_is_accepted(self, flashbench, base: Path, tmp_path: Path) -> None:
        flashbench("baseline", "update", base, "--why", "first")
        before = self.stored(tmp_path).read_text()
        slow = another(tmp_path, {A: steady(1.15), B: steady(2.0, seed=3)})
        refused = flashbench("baseline", "update", slow, "--why", "new kernel")
        assert refused.code == 1
        assert "not stored: regression" in refused.err
        assert self.stored(tmp_path).read_text() == before
        accepted = flashbench("baseline", "update", slow, "--why", "exact where the old one was not", "--accept")
        assert accepted.code == 0
        assert [line for line in accepted.out.splitlines() if line.startswith(f"{A}: ") and "-> 1.15" in line]
        assert flashbench("compare", self.stored(tmp_path), slow).code == 0

    def test_a_case_that_would_no_longer_be_watched_is_refused(self, flashbench, base: Path, tmp_path: Path) -> None:
        flashbench("baseline", "update", base, "--why", "first")
        refused = flashbench("baseline", "update", another(tmp_path, {A: steady(1.0)}), "--why", "smaller")
        assert refused.code == 3
        assert f"not stored: missing: 1 case, the worst: {B}" in refused.err

    @pytest.mark.parametrize(
        ("visits", "code", "words"),
        [([("crashed", "gone")] * 6, 4, "crashed: gone"), (steady(1.0, 1), 3, "too few rounds: 1")],
    )
    def test_a_run_that_nothing_could_be_compared_with_is_refused(
        self, flashbench, tmp_path: Path, visits: Any, code: int, words: str
    ) -> None:
        done = flashbench("baseline", "update", another(tmp_path, {A: visits}), "--why", "first")
        assert (done.code, words in done.err) == (code, True)
        assert not self.stored(tmp_path).exists()

    def test_nothing_stored_is_told_with_the_way_to_store(self, flashbench) -> None:
        done = flashbench("baseline", "show")
        assert (done.code, "baseline update" in done.line) == (3, True)

    def test_a_reason_is_needed(self, flashbench, base: Path) -> None:
        assert flashbench("baseline", "update", base, "--why", " ").code == 2


TINY = """
version: 1
name: ci
device: cpu
providers: [naive]
problems: {{dtype: fp32, seq_len: [48], head_dim: 16, heads: 2, mask: [none, causal]}}
measure: {{min_samples: 5, max_seconds: 0.05, warmup_ms: 10, confidence_width: 20%}}
gate: {gate}
"""


def _config(folder: Path, gate: str = "{margin: 50%, stored_margin: 100%, floor_us: 100}") -> Path:
    path = folder / "ci.yaml"
    path.write_text(TINY.format(gate=gate))
    return path


def _edit_header(run: Path, **changes: Any) -> None:
    header = json.loads((run / "run.json").read_text())
    header = {name: value for name, value in {**header, **changes}.items() if value is not None}
    (run / "run.json").write_text(json.dumps(header))


def _store(path: Path, device: str, **changes: Any) -> None:
    key = "naive forward fp32 b1 h2 s48 d16"
    seen = tuple(Observation(i, median_ms=0.1, method="wall", l2="warm", regime="isolated") for i in range(6))
    write_baseline(path, Baseline(Side({key: seen}, identity=Identity(device)), "ci"))
    if changes:
        lines = path.read_text().splitlines()
        lines[0] = json.dumps({**json.loads(lines[0]), **changes})
        path.write_text("\n".join(lines) + "\n")


class TestGate:
    def test_without_a_baseline_it_measures_and_says_how_to_store_one(self, cli, tmp_path: Path) -> None:
        _store(tmp_path / "results" / "baselines" / H200_ID / "ci.jsonl", H200_ID)
        done = cli("gate", str(_config(tmp_path)), "--rounds", "1")
        assert done.returncode == 3, done.stderr
        assert done.stdout.startswith("no baseline: 2 cases, the worst: naive forward")
        assert "nothing is stored at 'results/baselines/cpu-" in done.stdout
        assert "(this configuration is stored for h200-sxm-141gb)" in done.stdout
        assert "next: flashbench baseline update results/" in done.stderr
        (anchors,) = tmp_path.rglob("anchors.jsonl")
        found = [json.loads(line) for line in anchors.read_text().splitlines()]
        assert [(one["round"], one["name"]) for one in found] == [(0, "gemm"), (0, "copy")]
        assert all(min(one["samples_ms"]) > 0 for one in found)
        (rows,) = tmp_path.rglob("rows.jsonl")
        assert "gemm" not in rows.read_text(), "anchors are no rows"

    def test_a_baseline_of_another_gpu_ends_it_before_anything_is_measured(self, flashbench, tmp_path: Path) -> None:
        _store(tmp_path / "other.jsonl", H200_ID)
        done = flashbench("gate", _config(tmp_path), "--baseline", "other.jsonl")
        assert done.code == 3
        assert done.line.startswith("unlike machine: 1 case")
        assert "device h200-sxm-141gb against cpu-" in done.line
        assert not (tmp_path / "results").exists()

    @pytest.mark.parametrize(
        ("changes", "words"), [({"schema_version": 99}, "schema 99"), ({"identity": 7}, "damaged")]
    )
    def test_a_baseline_that_cannot_be_read_ends_it_before_anything_is_measured(
        self, flashbench, tmp_path: Path, changes: dict[str, Any], words: str
    ) -> None:
        _store(tmp_path / "b.jsonl", H200_ID, **changes)
        done = flashbench("gate", _config(tmp_path), "--baseline", "b.jsonl")
        assert (done.code, words in done.line) == (3, True)
        assert not (tmp_path / "results").exists()

    def test_a_named_baseline_that_is_not_there_is_code_3(self, flashbench, tmp_path: Path) -> None:
        done = flashbench("gate", _config(tmp_path), "--baseline", "b.jsonl")
        assert (done.code, "no baseline at 'b.jsonl'" in done.line) == (3, True)

    def test_an_override_that_matches_nothing_is_code_2(self, flashbench, tmp_path: Path) -> None:
        done = flashbench("gate", _config(tmp_path, '{overrides: {"flash-v2 *": {margin: 4%}}}'))
        assert done.code == 2
        assert "ci.yaml:8: gate.overrides['flash-v2 *']: matches no case" in done.line

    @pytest.mark.parametrize("text", ["", "version: 1\n", "version: 1\nproviders: [naive]\n", "gate: {}\n"])
    def test_an_empty_configuration_is_code_2(self, flashbench, tmp_path: Path, text: str) -> None:
        (tmp_path / "empty.yaml").write_text(text)
        done = flashbench("gate", "empty.yaml")
        assert (done.code, "empty.yaml" in done.line) == (2, True)

    def test_no_configuration_at_all_is_code_2(self, flashbench) -> None:
        assert flashbench("gate").code == 2

    def test_a_dry_run_names_the_baseline(self, flashbench, tmp_path: Path) -> None:
        done = flashbench("gate", _config(tmp_path), "--dry-run")
        assert done.code == 0
        assert "2 cases" in done.out
        assert "ci.jsonl (not there yet" in done.out

    def test_fresh_rounds_that_confirm_nothing_are_refused(self, flashbench, tmp_path: Path) -> None:
        done = flashbench("gate", _config(tmp_path), "--confirm-rounds", "2")
        assert (done.code, "--confirm-rounds" in done.line) == (2, True)


class TestAb:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ([], "nothing to compare"),
            (["--new", "HEAD"], "--new needs --base"),
            (["--base-provider", "naive"], "--new-provider is missing"),
            (["--new-python", "python3"], "--base-python is missing"),
            (["--base", "HEAD"], "--base: git rev-parse failed"),
            (
                ["--base-provider", "naive", "--new-provider", "tiled", "--provider", "sdpa"],
                "--provider cannot be given",
            ),
            (["--base-python", "no-such-python", "--new-python", "python3"], "'no-such-python' cannot be started"),
            (["--base-provider", "naive", "--new-provider", "tild"], "did you mean 'tiled'"),
            (["--inject", "5%"], "--inject belongs to --self-test"),
            (["--self-test", "--inject", "much"], "'much' is not a slowdown"),
        ],
    )
    def test_what_cannot_be_compared_is_code_2(
        self, flashbench, tmp_path: Path, arguments: list[str], words: str
    ) -> None:
        done = flashbench("ab", _config(tmp_path), *arguments)
        assert (done.code, words in done.line) == (2, True), done

    def test_each_side_runs_its_own_revision_and_the_worktree_is_gone_afterwards(self, cli, tmp_path: Path) -> None:
        _two_revisions(tmp_path)
        done = cli("ab", "ci.yaml", "--base", "first", "--rounds", "2", "--out", "out")
        assert done.returncode == 4, done.stderr
        assert done.stdout.startswith("failed: 1 case, the worst: mine.py:attention forward fp32 b1 h2 s48 d16")
        assert "on the base side: incorrect in round 0" in done.stdout
        assert "\nfailed" in done.stdout
        assert len(_git(tmp_path, "worktree", "list").splitlines()) == 1
        base, new = sorted((tmp_path / "out").rglob("run.json"), key=lambda path: json.loads(path.read_text())["side"])
        assert json.loads(base.read_text())["label"].startswith("first (")
        assert json.loads(new.read_text())["label"] == "working tree (new)"
        started = [[row.started for row in load_rows(path)] for path in (base, new)]
        assert started[0][0] < started[1][0] < started[1][1] < started[0][1], "the sides take turns in going first"
        again = cli("compare", str(base.parent), str(new.parent))
        assert again.returncode == 4
        assert again.stdout == done.stdout

    def test_an_interrupted_one_goes_on_with_the_revision_that_it_began_with(self, cli, tmp_path: Path) -> None:
        _two_revisions(tmp_path)
        whole = cli("ab", "ci.yaml", "--base", "first", "--rounds", "1", "--out", "out")
        assert whole.returncode == 4, whole.stderr
        base, new = sorted((tmp_path / "out").rglob("rows.jsonl"))
        kept = new.read_text()
        base.write_text("")
        _git(tmp_path, "add", "mine.py")
        _git(tmp_path, *ADA, "commit", "--quiet", "-m", "right")
        _git(tmp_path, "tag", "--force", "first")
        resumed = cli("ab", "--resume", "out")
        assert (resumed.returncode, resumed.stdout) == (4, whole.stdout)
        assert new.read_text() == kept, "what is there is not measured again"
        assert len(base.read_text().splitlines()) == 1
        assert "note: the new side is the working tree as it is now" in resumed.stderr
        assert "screening: 1 visits" in resumed.stderr

    def test_a_self_test_goes_on_with_the_extra_work_that_it_had_sized(
        self, flashbench, tmp_path: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from flashbench.config.load import load
        from flashbench.run.devices import find_device

        monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))
        plain, quiet = (f"naive forward fp32 b1 h2 s48 d16{mask}" for mask in ("", " causal"))
        twin = f"slowed-48x32:{plain}"
        sized = Injection(Case.from_key(plain), Case.from_key(twin), asked=0.9, size=0.8, low=0.7, high=0.9)
        facts: dict[str, Any] = {"device": find_device("cpu"), "device_id": "cpu", "pair": "one", "anchors": False}
        facts["injections"] = [to_plain(sized)]
        config = {"config": load(_config(tmp_path)).resolved()}
        # Every row is there but for the verdict, so nothing is left to measure.
        base = {plain: [*steady(1.0), *steady(1.0, 12, seed=2)], quiet: steady(0.6, seed=3)}
        new = {twin: [*steady(1.8, seed=4), *steady(1.8, 12, seed=5)], quiet: steady(0.6, seed=6)}
        for side, cases in (("base", base), ("new", new)):
            names = {"compared_as": {twin: plain}} if side == "new" else {}
            run = write_run(tmp_path / "out", cases, name=side, side=side, **facts, **names)
            _edit_header(run, gate={"screening_rounds": 6, "confirm_rounds": 12}, **config)
        done = flashbench("ab", "--resume", "out")
        assert done.code == 0, done.out + done.err
        assert "injected +90.0 %: +80.0 % by itself (+70.0 % to +90.0 %), the gate saw " in done.out
        assert "self-test passed: 1 of 1 slowdowns found, 1 unchanged cases quiet" in done.out
        assert "visits" not in done.err

    @pytest.mark.parametrize(
        ("header", "code", "words"),
        [
            ({}, 2, "is no side of an `ab`"),
            ({"pair": "one", "side": "new"}, 3, "the base side of"),
        ],
    )
    def test_what_cannot_go_on_says_why(
        self, flashbench, tmp_path: Path, header: dict[str, str], code: int, words: str
    ) -> None:
        done = flashbench("ab", "--resume", another(tmp_path, **header))
        assert (done.code, words in done.line) == (code, True), done

    def test_a_pair_that_does_not_say_what_its_sides_are_cannot_go_on(self, flashbench, tmp_path: Path) -> None:
        for side in ("base", "new"):
            write_run(tmp_path / "out", {A: steady(1.0)}, name=side, pair="one", side=side)
        done = flashbench("ab", "--resume", "out")
        assert (done.code, "does not say what its sides are" in done.line) == (3, True), done

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (("--resume", "run", "--base", "HEAD"), "leave out --base"),
            (("--resume", "run", "--out", "elsewhere"), "leave out --out"),
            (
                ("ci.yaml", "--resume", "run", "--self-test", "--rounds", "3"),
                "leave out 'ci.yaml', --rounds, --self-test",
            ),
            (("--resume", "--out", "elsewhere"), "--resume --out goes on with"),
        ],
        ids=["a side", "a folder", "a new self-test", "no run"],
    )
    def test_going_on_names_what_it_takes_from_the_run_alone(
        self, flashbench, arguments: tuple[str, ...], told: str
    ) -> None:
        done = flashbench("ab", *arguments)
        assert (done.code, told in done.line) == (2, True), done

    def test_going_on_takes_reports(self, flashbench, tmp_path: Path) -> None:
        done = flashbench(
            "ab", "--resume", another(tmp_path), "--json", "o.json", "--markdown", "o.md", "--junit", "o.xml"
        )
        assert "is no side of an `ab`" in done.line

    def test_an_unknown_revision_is_told_with_the_nearest(self, flashbench, tmp_path: Path) -> None:
        _git(tmp_path, "init", "--quiet")
        _git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--allow-empty", "-m", "one")
        _git(tmp_path, "tag", "release")
        done = flashbench("ab", _config(tmp_path), "--base", "relase")
        assert done.code == 2
        assert "--base: 'relase' is no revision of this repository; did you mean 'release'?" in done.line


ADA = ("-c", "user.name=ada", "-c", "user.email=ada@example.org")


def _two_revisions(folder: Path) -> None:
    """A kernel that is wrong in the revision `first` and right in the working tree, and a configuration with one case of it."""
    kernel = "def attention(q, k, v, *, mask, window, scale):\n    scores = (q * scale) @ k.mT\n{}"
    (folder / "mine.py").write_text(kernel.format("    return scores @ v\n"))
    _git(folder, "init", "--quiet")
    _git(folder, "add", "mine.py")
    _git(folder, *ADA, "commit", "--quiet", "-m", "wrong")
    _git(folder, "tag", "first")
    (folder / "mine.py").write_text(kernel.format("    return scores.softmax(-1) @ v\n"))
    config = _config(folder)
    config.write_text(config.read_text().replace("[naive]", "['mine.py:attention']").replace(", causal]", "]"))


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout


class TestCalibrate:
    def test_a_recorded_campaign_gives_rates_and_margins(self, flashbench, tmp_path: Path) -> None:
        run = another(tmp_path, {A: steady(1.0, 24, 0.003), B: steady(2.0, 24, 0.05, seed=1)})
        config = tmp_path / "mine.yaml"
        config.write_text("providers: [naive]   # the yardstick\ngate: {margin: 2%}\n")
        done = flashbench("calibrate", "--from", run, "--write", config)
        assert done.code == 0
        assert "A against A: 2 cases, 24 rounds, screenings of 6 pairs" in done.out
        assert "false alarms, per case (flagged and confirmed)" in done.out
        assert re.search(r"per case: [\d.]+ % \(95 % bootstrap interval over cases [\d.]+ % to [\d.]+ %\)", done.out)
        assert re.search(
            r"simulated at this campaign's median process sd of [\d.]+ % and drift of .*(inside|outside)", done.out
        )
        margins = done.out.partition("\ngate:\n")[2]
        assert B in margins
        assert A not in margins
        assert not (run / "margins.yaml").exists(), "a run that is only read stays as it is"
        assert "# the yardstick" in config.read_text()
        from flashbench.config.load import load

        text = config.read_text() + "problems: {dtype: fp32, seq_len: 64, head_dim: 32, heads: 2}\n"
        config.write_text(text)
        assert load(config).gate.limits_for(B).margin > 0.03
        assert load(config).gate.limits_for(A).margin == 0.02

    def test_one_source_of_rounds_is_needed(self, flashbench, base: Path) -> None:
        assert flashbench("calibrate").code == 2
        assert flashbench("calibrate", "ci.yaml", "--from", base).code == 2

    def test_too_few_rounds_for_a_screening_are_refused(self, flashbench, base: Path) -> None:
        done = flashbench("calibrate", "--from", base)
        assert (done.code, "record at least 12 rounds" in done.line) == (2, True)


def test_the_simulation_is_a_command(flashbench) -> None:
    done = flashbench("simulate", "--suites", "2", "--only", "stored")
    assert done.code == 0
    assert done.line.startswith("stored: suites of 30 cases")
    assert flashbench("simulate", "--suites", "0").code == 2


@pytest.mark.slow
class TestEndToEnd:
    """Minutes of real rounds on this machine's CPU, with margins that its noise does not reach."""

    def test_a_gate_passes_on_the_baseline_that_it_measured(self, cli, tmp_path: Path) -> None:
        config = str(_config(tmp_path, "{margin: 100%, stored_margin: 400%, floor_us: 300}"))
        assert cli("gate", config).returncode == 3
        assert cli("baseline", "update", "results", "--why", "first").returncode == 0
        passed = cli("gate", config)
        assert passed.returncode == 0, passed.stdout + passed.stderr

    def test_the_self_test_finds_what_it_injects(self, cli, tmp_path: Path) -> None:
        config = tmp_path / "ci.yaml"
        config.write_text(
            TINY.format(gate="{margin: 25%, stored_margin: 30%, floor_us: 20}")
            .replace("[48]", "[256]")
            .replace("[naive]", "[naive, sdpa-flash]")
        )
        for command in ("gate", "ab"):
            done = cli(command, str(config), "--self-test", "--inject", "90%", "--confirm-rounds", "6", timeout=400)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "self-test passed: 1 of 1 slowdowns found, 3 unchanged cases quiet" in done.stdout
        base, new = sorted(tmp_path.rglob("*-self-test-*/rows.jsonl"))[-2:]
        for rows in (base, new):  # as if it had been killed in its last rounds
            rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:-3]))
        done = cli("ab", "--resume", str(new.parent), timeout=400)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "measuring 1 flagged cases again: 6 visits" in done.stderr
        assert "self-test passed: 1 of 1 slowdowns found, 3 unchanged cases quiet" in done.stdout

    def test_a_campaign_goes_on_where_its_budget_ended(self, cli, tmp_path: Path) -> None:
        config = str(_config(tmp_path))
        started = cli("calibrate", config, "--rounds", "12", "--minutes", "0.1", "--out", "out")
        assert started.returncode == 0
        assert "go on with: flashbench calibrate --resume out/" in started.stderr
        finished = cli("calibrate", "--resume", "out")
        assert finished.returncode == 0, finished.stderr
        assert "A against A: 2 cases, 12 rounds" in finished.stdout
        assert len(list(tmp_path.rglob("margins.yaml"))) == 1
