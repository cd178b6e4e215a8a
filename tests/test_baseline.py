"""Baselines on disk: read as written, good to review in a diff, and refused with a reason when they cannot be trusted."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashbench.errors import StoreError, UsageError
from flashbench.records import Case, Memory, Row, State, Timing
from flashbench.store.baseline import Baseline, baseline_changes, baseline_path, read_baseline, write_baseline
from flashbench.store.side import Identity, Observation, Side, side_from_rows, typical_ms

A = "flash-v2 forward bf16 b4 h16 s1024 d128 causal"
B = "sdpa-cudnn forward bf16 b4 h16 s1024 d128 causal"
SEEN = tuple(
    Observation(
        i,
        median_ms=0.119168 + i / 1000,
        method="events",
        l2="cold",
        regime="isolated",
        sm_clock_mhz=1980 - 15 * i,
        throttle_reasons=("software power cap",) if i else (),
        peak_bytes=8388608,
    )
    for i in range(3)
)
SIDE = Side(
    {B: (Observation(0, "oom", reason="needs 200 GB"),), A: SEEN},
    {"gemm": {0: 1.5, 1: 1.25, 2: 1.75}},
    Identity("h200-sxm-141gb", (9, 0), False, 700.0),
    {"torch": "2.11.0", "driver": "570.1"},
)
STORED = Baseline(SIDE, "ci", run="20260101T000000Z-ci", who="ada", why="first one", written="2026-01-01T00:00:00Z")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    written = baseline_path(tmp_path, "h200-sxm-141gb", "ci")
    write_baseline(written, STORED)
    return written


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rewrite(path: Path, number: int, **changes: Any) -> None:
    """Change fields of one line (from 0); None removes a field."""
    records = lines(path)
    records[number] = {k: v for k, v in {**records[number], **changes}.items() if v is not None}
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_baseline_is_read_as_it_was_written(path: Path) -> None:
    back = read_baseline(path)
    assert dict(back.side.cases) == dict(SIDE.cases)
    assert back.side.anchors == SIDE.anchors
    assert (back.side.identity, back.side.versions) == (SIDE.identity, SIDE.versions)
    assert dataclasses.replace(back, side=SIDE) == STORED


def test_its_place_names_the_device_and_the_configuration(path: Path) -> None:
    assert path.parts[-2:] == ("h200-sxm-141gb", "ci.jsonl")


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden"])
def test_a_name_that_would_leave_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot name a baseline"):
        baseline_path(tmp_path, "h200-sxm-141gb", name)


def test_the_header_says_who_why_and_from_which_run(path: Path) -> None:
    header = lines(path)[0]
    assert {name: header[name] for name in ("who", "why", "run")} == {
        "who": "ada",
        "why": "first one",
        "run": "20260101T000000Z-ci",
    }
    assert header["identity"]["device"] == "h200-sxm-141gb"
    assert header["versions"]["driver"] == "570.1"


def test_cases_stand_sorted_one_a_line_so_that_a_change_is_one_line_of_a_diff(path: Path) -> None:
    before = path.read_text().splitlines()
    assert [line["key"] for line in lines(path)[1:]] == sorted((A, B))
    slower = tuple(dataclasses.replace(seen, median_ms=1.0) for seen in SEEN)
    write_baseline(path, dataclasses.replace(STORED, side=dataclasses.replace(SIDE, cases={**SIDE.cases, A: slower})))
    after = path.read_text().splitlines()
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]


def test_what_is_the_same_in_every_round_is_written_once(path: Path) -> None:
    line = lines(path)[1]
    assert line["peak_bytes"] == 8388608
    assert line["sm_clock_mhz"] == [1980, 1965, 1950]
    assert "energy_j" not in line
    assert "rounds" not in line


def test_rounds_keep_their_numbers_so_that_they_find_their_anchors(path: Path) -> None:
    gap = (SEEN[0], SEEN[2])
    write_baseline(path, dataclasses.replace(STORED, side=dataclasses.replace(SIDE, cases={A: gap})))
    assert read_baseline(path).side.cases[A] == gap


@given(
    times=st.lists(st.one_of(st.none(), st.floats(1e-4, 1e4)), min_size=1, max_size=8),
    clocks=st.one_of(st.none(), st.integers(200, 2000)),
)
@settings(max_examples=50)
def test_writing_again_what_was_read_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, times: list[float | None], clocks: int | None
) -> None:
    path = tmp_path_factory.mktemp("b") / "x" / "ci.jsonl"
    seen = tuple(Observation(i, median_ms=ms, sm_clock_mhz=clocks) for i, ms in enumerate(times))
    write_baseline(path, Baseline(Side({A: seen}), "ci"))
    first = path.read_bytes()
    back = read_baseline(path)
    assert [o.median_ms for o in back.side.cases[A]] == [
        None if ms is None else pytest.approx(ms, rel=1e-5) for ms in times
    ]
    write_baseline(path, back)
    assert path.read_bytes() == first


def test_a_number_that_is_none_is_written_as_null(path: Path) -> None:
    seen = (Observation(0, median_ms=math.nan), Observation(1, median_ms=math.inf), Observation(2, median_ms=1.0))
    write_baseline(path, dataclasses.replace(STORED, side=Side({A: seen})))
    assert lines(path)[1]["median_ms"] == [None, None, 1.0]


def test_a_nan_or_a_zero_that_someone_put_into_the_file_is_left_for_the_gate_to_judge(path: Path) -> None:
    path.write_text(path.read_text().replace("[0.119168, 0.120168,", "[NaN, 0.0,"))
    times = [seen.median_ms for seen in read_baseline(path).side.cases[A]]
    assert math.isnan(times[0] or 0.0)
    assert times[1] == 0.0


def test_an_older_file_is_read_with_its_missing_fields_unknown(path: Path) -> None:
    # GA-10: fields that a later version added are not there, and not an error.
    rewrite(path, 0, schema_version=0, versions=None, anchors=None, identity=None, who=None)
    rewrite(path, 1, method=None, l2=None, regime=None, sm_clock_mhz=None, throttle_reasons=None, peak_bytes=None)
    back = read_baseline(path)
    assert back.who is None
    assert back.side.identity == Identity()
    assert back.side.cases[A][0] == Observation(0, median_ms=0.119168)


def test_a_field_of_a_later_version_is_ignored(path: Path) -> None:
    rewrite(path, 1, humidity=[1, 2, 3])
    assert read_baseline(path).side.cases[A] == SEEN


def test_a_newer_schema_is_refused_with_both_versions(path: Path) -> None:
    rewrite(path, 0, schema_version=99)
    with pytest.raises(StoreError, match=r"schema 99, this flashbench reads up to 1") as caught:
        read_baseline(path)
    assert caught.value.exit_code == 3


def test_no_baseline_names_the_path_and_what_to_do(path: Path) -> None:
    with pytest.raises(StoreError, match=r"no baseline at .*nothing.jsonl.*flashbench baseline update") as caught:
        read_baseline(path.with_name("nothing.jsonl"))
    assert caught.value.exit_code == 3
    with pytest.raises(StoreError, match="did you mean 'ci'"):
        read_baseline(path.with_name("cii.jsonl"))


@pytest.mark.parametrize(
    ("number", "changes"),
    [
        (0, {"kind": None}),
        (0, {"schema_version": "one"}),
        (0, {"anchors": [1, 2]}),
        (0, {"anchors": {"gemm": {"median_ms": ["quick"]}}}),
        (1, {"key": None}),
        (1, {"key": B}),
        (1, {"median_ms": None}),
        (1, {"median_ms": ["quick", 1, 2]}),
        (1, {"median_ms": [1, 2]}),
        (1, {"rounds": [0, 1]}),
        (1, {"rounds": [0, 1, 1]}),
        (1, {"rounds": ["a", "b", "c"]}),
        (1, {"sm_clock_mhz": "fast"}),
        (1, {"throttle_reasons": 4}),
        (1, {"status": "splendid"}),
    ],
)
def test_a_damaged_file_is_refused_with_its_line(path: Path, number: int, changes: dict[str, Any]) -> None:
    rewrite(path, number, **changes)
    with pytest.raises(StoreError, match=r"ci\.jsonl:\d+: ") as caught:
        read_baseline(path)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("text", ["", "\n", "[]\n", "{\n", "null\n", "\x00\x01"])
def test_a_file_that_is_no_baseline_is_refused(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(StoreError):
        read_baseline(path)


def test_a_file_that_is_no_text_is_refused(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StoreError, match="cannot be read"):
        read_baseline(path)


def test_half_a_file_is_refused(path: Path) -> None:
    path.write_text(path.read_text()[:-30])
    with pytest.raises(StoreError, match=r"ci\.jsonl:3: damaged"):
        read_baseline(path)


def test_a_header_without_cases_is_no_baseline(path: Path) -> None:
    path.write_text(path.read_text().splitlines()[0] + "\n")
    with pytest.raises(StoreError, match="holds no case"):
        read_baseline(path)


def test_a_side_without_cases_is_not_stored(path: Path) -> None:
    before = path.read_text()
    with pytest.raises(UsageError, match="no case to store"):
        write_baseline(path, Baseline(Side({}), "ci"))
    assert path.read_text() == before


def test_what_an_update_would_change_is_told_slowest_first() -> None:
    slower = tuple(dataclasses.replace(seen, median_ms=2 * (seen.median_ms or 0)) for seen in SEEN)
    new = Side({A: slower, "naive forward fp32 b1 h1 s1 d64": SEEN})
    told = baseline_changes(SIDE, new)
    assert told[0] == f"{A}: 0.1202 -> 0.2403 ms (+100.0%)"
    assert told[1:] == (f"removed: {B}", "added: naive forward fp32 b1 h1 s1 d64")
    assert baseline_changes(SIDE, SIDE) == ()


def test_a_side_is_made_of_a_runs_rows_and_their_medians() -> None:
    case = Case.from_key(A)
    row = Row(
        case,
        1,
        "ok",
        timing=Timing("graph", "warm", "sustained", 50, 10.0),
        memory=Memory(100, 350),
        state=State(sm_clock_mhz=(1900, 1980), throttle_reasons=("hardware slowdown",)),
        energy_j=0.5,
    )
    failed = Row(case, 0, "crashed", reason="gone")
    made = side_from_rows([row, failed], {(A, 1): 0.25}, label="main")
    assert made.cases[A] == (
        Observation(0, "crashed", reason="gone"),
        Observation(
            1,
            "ok",
            0.25,
            None,
            "graph",
            "warm",
            "sustained",
            1940.0,
            ("hardware slowdown",),
            peak_bytes=250,
            energy_j=0.5,
        ),
    )


def test_the_typical_time_is_the_median_of_the_rounds_that_have_one() -> None:
    assert typical_ms([Observation(0, median_ms=ms) for ms in (3.0, None, 1.0, math.nan)]) == 2.0
    assert typical_ms([Observation(0)]) is None
