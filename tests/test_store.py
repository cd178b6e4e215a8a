"""A run on disk: what is written is read again, whatever happens to the writer."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashbench.errors import StoreError, UsageError
from flashbench.records import Case, Check, Device, Memory, Problem, Row, State, Timing
from flashbench.store.frame import frame
from flashbench.store.read import done, find_run, load_rows, load_run
from flashbench.store.run import RunWriter

GOLDEN = Path(__file__).parent / "data" / "run-schema-1"
HEADER: dict[str, Any] = {
    "command": ["flashbench", "run", "configs/forward.yaml"],
    "device": Device(kind="cuda", name="NVIDIA H200", memory_bytes=150_754_820_096, capability=(9, 0), sm_count=132),
    "environment": {"hostname": "example"},
    "config": {"version": 1, "name": "forward"},
    "ceilings": [],
    "cases": ["naive forward bf16 b4 h16 s4096 d128 causal"],
}
PROBLEM = Problem(4, 16, 16, 4096, 4096, 128, 128, "bf16", "causal")
CASE = Case("naive", PROBLEM)
FULL_ROW = Row(
    case=CASE,
    round=0,
    status="ok",
    warnings=("its output differs from call to call by up to 0.001",),
    started="2026-01-02T03:04:05Z",
    seconds=3.25,
    first_call_ms=412.5,
    backend="flash",
    check=Check("out", 2.1e-3, 0.0156, 8.4e-3, 0.06, 2.05e-3, 0.0155, "float64", 0.001),
    timing=Timing("events", "cold", "isolated", 3, 120.0, 0, 0.31, True),
    memory=Memory(268_435_456, 402_653_184),
    state=State((1700, 1980), 3201, 512.5, 61, ("power_cap",), 0),
    launch={"block_q": 128, "warps": 8},
)
FULL_SAMPLES = [0.0423, 0.0425, 0.042]


def row(case: Case = CASE, number: int = 0, status: str = "ok", **more: Any) -> Row:
    return Row(case=case, round=number, status=status, **more)  # type: ignore[arg-type]


def cases(count: int) -> list[Case]:
    return [Case("naive", dataclasses.replace(PROBLEM, batch=n + 1)) for n in range(count)]


def create(root: Path, name: str = "forward") -> RunWriter:
    return RunWriter.create(root, "h200-sxm-141gb", name, HEADER)


@pytest.fixture
def five_rows(tmp_path: Path) -> Path:
    with create(tmp_path) as writer:
        for number, case in enumerate(cases(5)):
            writer.append(row(case), [1.0 + number, 2.0 + number])
    return writer.path


# Writing and reading


def test_a_row_and_its_samples_come_back_as_they_were_written(tmp_path: Path) -> None:
    with create(tmp_path) as writer:
        writer.append(FULL_ROW, FULL_SAMPLES)
    run = load_run(writer.path)
    assert run.rows == (FULL_ROW,)
    assert run.notes == ()
    # IO-07: 0.0423 ms survives to the precision of float32, 1e-7 of its value
    assert list(run.samples_ms[FULL_ROW.key, 0]) == pytest.approx(FULL_SAMPLES, rel=1e-7)


def test_the_folder_is_named_by_device_time_and_name(tmp_path: Path) -> None:
    with create(tmp_path, "forward") as writer:
        assert writer.path.parent == tmp_path / "h200-sxm-141gb"
        stamp, name = writer.path.name.split("-", 1)
    assert name == "forward"
    assert time.strptime(stamp, "%Y%m%dT%H%M%SZ")


def test_two_runs_of_one_second_get_two_folders(tmp_path: Path) -> None:
    with create(tmp_path) as first, create(tmp_path) as second:
        assert first.path != second.path


def test_a_name_with_separators_stays_inside_the_root(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "root", "../device", "../../a b", HEADER) as writer:
        assert writer.path.parent.parent == tmp_path / "root"


def test_the_header_holds_the_device_and_the_planned_cases(tmp_path: Path) -> None:
    with create(tmp_path) as writer:
        header = json.loads((writer.path / "run.json").read_text())
    assert header["schema_version"] == 1
    assert header["device"]["capability"] == [9, 0]
    assert header["cases"] == HEADER["cases"]


def test_the_format_is_that_of_the_golden_run(tmp_path: Path) -> None:
    with create(tmp_path) as writer:
        writer.append(FULL_ROW, FULL_SAMPLES)
        writer.append(row(number=1, status="oom", reason="wanted 1.0 TiB of 140 GiB"))
    golden, header = (json.loads((path / "run.json").read_text()) for path in (GOLDEN, writer.path))
    assert list(header) == list(golden)
    for varies in ("started", "flashbench"):
        header[varies] = golden[varies]
    assert header == golden
    for name in ("rows.jsonl", "samples.f32"):
        assert (writer.path / name).read_bytes() == (GOLDEN / name).read_bytes()


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    # IO-02: the files are JSON for every reader
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    broken = Check("out", float("nan"), float("inf"), 1.0, 1.0, 1.0, 1.0, "float64")
    with create(tmp_path) as writer:
        writer.append(row(status="incorrect", reason="3 NaN in out", check=broken, seconds=float("-inf")))
    plain = json.loads((writer.path / "rows.jsonl").read_text(), parse_constant=refuse)
    assert plain["check"]["error_norm"] is None
    check = load_rows(writer.path)[0].check
    assert check is not None
    assert check.error_max is None


def test_a_sample_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    with create(tmp_path) as writer, pytest.raises(ValueError, match="not finite"):
        writer.append(row(), [1.0, float("nan")])


@pytest.mark.parametrize(
    "change",
    [
        {"mode": "backward"},
        {"dtype": "fp16"},
        {"dtype": "tf32"},
        {"mask": "none"},
        {"mask": "window:64"},
        {"seq_kv": 8192},
        {"heads_kv": 4},
        {"head_dim_v": 64},
        {"page_size": 16},
    ],
    ids=str,
)
def test_cases_that_differ_in_one_thing_are_two_rows(tmp_path: Path, change: dict[str, Any]) -> None:
    # IO-04
    other = Case("naive", dataclasses.replace(PROBLEM, **change))
    with create(tmp_path) as writer:
        writer.append(row(), [1.0])
        writer.append(row(other), [2.0])
    run = load_run(writer.path)
    assert [list(run.samples_ms[r.key, 0]) for r in run.rows] == [[1.0], [2.0]]


def test_a_second_row_of_a_visit_is_refused(tmp_path: Path) -> None:
    # IO-04
    with create(tmp_path) as writer:
        writer.append(row(), [1.0])
        writer.append(row(number=1), [1.0])
        with pytest.raises(StoreError, match="already in"):
            writer.append(row(), [2.0])


@pytest.mark.parametrize("status", ["crashed", "timeout"])
def test_a_visit_that_died_is_measured_again_and_the_last_row_counts(tmp_path: Path, status: str) -> None:
    with create(tmp_path) as writer:
        writer.append(row(status=status, reason="gone"))
    assert done(load_run(writer.path)) == set()
    with RunWriter.resume(tmp_path) as writer:
        writer.append(row(), [1.0])
    run = load_run(writer.path, strict=True)
    assert [r.status for r in run.rows] == ["ok"]
    assert done(run) == {(CASE.key, 0)}


def test_a_repeated_visit_stands_where_it_was_repeated(tmp_path: Path) -> None:
    first, second = cases(2)
    with create(tmp_path) as writer:
        writer.append(row(first, status="crashed", reason="gone"))
        writer.append(row(second), [1.0])
        writer.append(row(first), [2.0])
    assert [r.case for r in load_rows(writer.path)] == [second, first]


@pytest.mark.parametrize("status", ["ok", "checked", "unsupported", "oom", "incorrect", "invalid", "error"])
def test_a_visit_that_answered_is_done(tmp_path: Path, status: str) -> None:
    with create(tmp_path) as writer:
        writer.append(row(status=status, reason="a reason"))
    assert done(load_run(writer.path)) == {(CASE.key, 0)}


def test_the_writer_and_the_reader_need_neither_pandas_nor_numpy() -> None:
    code = "import sys, flashbench.store.run, flashbench.store.frame; print({'pandas', 'numpy', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


# Places that cannot be written


def test_a_root_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--out"):
        create(tmp_path / "file")


def test_a_second_writer_is_told_who_holds_the_run(tmp_path: Path) -> None:
    code = f"from flashbench.store.run import RunWriter; RunWriter.resume({str(tmp_path)!r})"
    with create(tmp_path):
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "UsageError" in child.stderr
    assert f"process {os.getpid()}" in child.stderr


def test_a_closed_run_can_be_written_again(tmp_path: Path) -> None:
    create(tmp_path).close()
    with RunWriter.resume(tmp_path) as writer:
        writer.append(row(), [1.0])
    assert len(load_rows(tmp_path)) == 1


def test_a_full_disk_loses_no_earlier_row(tmp_path: Path) -> None:
    child = run_child(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
        try:
            write(forever=True)
        except StoreError as error:
            print("StoreError", error)
        """,
        tmp_path,
    )
    out, _ = child.communicate(timeout=60)
    finished = [int(line) for line in out.splitlines() if line.isdigit()]
    assert "rows before it are safe" in out.splitlines()[-1]
    run = load_run(tmp_path, strict=True)
    assert [r.round for r in run.rows] == finished
    assert run.notes == ()


# Kills


def run_child(code: str, root: Path) -> subprocess.Popen[str]:
    """A process that can `write` rows of rounds 0, 1, ... and prints each number when `append` has returned."""
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_store import CASE, StoreError, create, row
from pathlib import Path
def write(forever):
    writer = create(Path({str(root)!r}))
    number = 0
    while forever:
        writer.append(row(number=number, reason="x" * 200), [float(number)] * (1 + number % 40))
        print(number, flush=True)
        number += 1
{textwrap.dedent(code)}
"""
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("moment", range(10))
def test_a_kill_at_any_moment_leaves_every_finished_row_readable(tmp_path: Path, moment: int) -> None:
    with run_child("write(forever=True)", tmp_path) as child:
        assert child.stdout is not None
        first = child.stdout.readline()
        time.sleep(random.uniform(0, 0.05))
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.readlines()  # not communicate(): it would lose the lines that readline() read ahead
    finished = [int(line) for line in (first, *rest)]

    before = load_run(tmp_path, strict=True)
    assert [r.round for r in before.rows][: len(finished)] == finished
    assert len(before.rows) <= len(finished) + 1
    with RunWriter.resume(tmp_path) as writer:  # and the lock died with its holder
        writer.append(row(number=10_000_000), [7.0])
    after = load_run(tmp_path, strict=True)
    assert after.notes == ()
    for r in after.rows[:-1]:
        assert list(after.samples_ms[r.key, r.round]) == [float(r.round)] * (1 + r.round % 40)
    assert list(after.samples_ms[CASE.key, 10_000_000]) == [7.0]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1))
def test_rows_cut_at_any_byte_are_read_and_resumed(five_rows: Path, tmp_path: Path, share: float) -> None:
    copy = tmp_path / f"copy-{share}"
    shutil.copytree(five_rows, copy, dirs_exist_ok=True)
    content = (copy / "rows.jsonl").read_bytes()
    cut = content[: round(share * len(content))]
    (copy / "rows.jsonl").write_bytes(cut)

    whole = len([line for line in cut.split(b"\n") if line and line in content.split(b"\n")])
    assert len(load_rows(copy, strict=True)) == whole
    with RunWriter.resume(copy) as writer:
        for number, case in list(enumerate(cases(5)))[whole:]:
            writer.append(row(case), [1.0 + number, 2.0 + number])
    run = load_run(copy, strict=True)
    assert [list(run.samples_ms[r.key, 0]) for r in run.rows] == [[1.0 + n, 2.0 + n] for n in range(5)]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(0, 40))
def test_samples_lost_by_the_disk_are_measured_again_and_never_replaced_by_others(
    five_rows: Path, tmp_path: Path, size: int
) -> None:
    copy = tmp_path / f"copy-{size}"
    shutil.copytree(five_rows, copy, dirs_exist_ok=True)
    samples = copy / "samples.f32"
    samples.write_bytes(samples.read_bytes()[:size])

    kept = size // 8
    assert len(done(load_run(copy))) == kept
    with RunWriter.resume(copy) as writer:
        for case in cases(5)[kept:]:
            writer.append(row(case), [9.0])
    run = load_run(copy, strict=True)
    assert [list(run.samples_ms[r.key, 0]) for r in run.rows] == [[1.0 + n, 2.0 + n] for n in range(kept)] + [[9.0]] * (
        5 - kept
    )


# Damage and versions


def test_half_a_last_line_is_reported_and_cut_off(five_rows: Path) -> None:
    with (five_rows / "rows.jsonl").open("a") as file:
        file.write('{"key": "naive forw')
    assert "half a line" in load_run(five_rows, strict=True).notes[0]
    with RunWriter.resume(five_rows) as writer:
        assert "half a line" in writer.notes[0]
    assert load_run(five_rows).notes == ()


@pytest.mark.parametrize("damage", ["{", "[1, 2]", "\x00\x00\x00", "null", '{"case": {"provider": "naive"}}', "\udcff"])
def test_a_damaged_line_in_the_middle_is_named_and_the_rest_is_read(five_rows: Path, damage: str) -> None:
    lines = (five_rows / "rows.jsonl").read_bytes().splitlines()
    lines[2] = damage.encode(errors="surrogateescape")
    (five_rows / "rows.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    run = load_run(five_rows)
    assert len(run.rows) == 4
    assert "rows.jsonl:3:" in run.notes[0]
    with pytest.raises(StoreError, match=r"rows\.jsonl:3:"):
        load_run(five_rows, strict=True)


def test_a_visit_that_stands_twice_in_a_file_is_an_error_when_strict(five_rows: Path) -> None:
    # IO-04, for a file that was put together by hand
    content = (five_rows / "rows.jsonl").read_bytes()
    (five_rows / "rows.jsonl").write_bytes(content + content.splitlines(keepends=True)[0])
    with pytest.raises(StoreError, match=r"rows\.jsonl:6: a second row"):
        load_run(five_rows, strict=True)
    assert len(load_rows(five_rows)) == 5


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema_version": "one"}', '{"schema_version": null}'])
def test_a_damaged_header_is_a_store_error(five_rows: Path, text: str) -> None:
    (five_rows / "run.json").write_text(text)
    with pytest.raises(StoreError, match=r"run\.json"):
        load_run(five_rows)


def test_a_newer_schema_is_refused_with_what_to_do(five_rows: Path) -> None:
    # GA-10
    (five_rows / "run.json").write_text('{"schema_version": 2}')
    with pytest.raises(StoreError, match="newer flashbench") as caught:
        load_run(five_rows)
    assert caught.value.exit_code == 3


def test_an_older_schema_is_read_with_its_missing_fields_as_none(tmp_path: Path) -> None:
    # GA-10
    shutil.copytree(GOLDEN, tmp_path / "old")
    (tmp_path / "old" / "run.json").write_text('{"schema_version": 0}')
    lines = [json.loads(line) for line in (GOLDEN / "rows.jsonl").read_text().splitlines()]
    for missing in ("naive_error_norm", "tolerance_max"):
        del lines[0]["check"][missing]
    del lines[0]["timing"]["warmup_ms"], lines[0]["memory"], lines[0]["seconds"]
    (tmp_path / "old" / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first = load_rows(tmp_path / "old", strict=True)[0]
    assert first.check is not None
    assert first.check.naive_error_norm is None
    assert first.memory is None
    assert frame(load_run(tmp_path / "old"))["naive_error_norm"].isna().all()


def test_the_golden_run_is_read() -> None:
    run = load_run(GOLDEN, strict=True)
    assert run.rows[0] == FULL_ROW
    assert run.rows[1].status == "oom"
    assert list(run.samples_ms[CASE.key, 0]) == pytest.approx(FULL_SAMPLES, rel=1e-7)


# Finding


def test_a_folder_above_means_its_newest_run(tmp_path: Path) -> None:
    for number, started in enumerate(["2026-03-01T00:00:00Z", "2026-05-01T00:00:00Z", "2026-04-01T00:00:00Z"]):
        folder = tmp_path / f"device-{number % 2}" / f"run-{9 - number}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"schema_version": 1, "started": started}))
    assert find_run(tmp_path).name == "run-8"
    assert find_run(tmp_path / "device-0").name == "run-7"


def test_a_run_and_a_file_in_it_mean_that_run(five_rows: Path) -> None:
    assert find_run(five_rows) == five_rows
    assert find_run(five_rows / "rows.jsonl") == five_rows


def test_a_run_that_died_before_its_first_row_is_not_the_newest(tmp_path: Path) -> None:
    for name, rows in (("older", "{}\n"), ("newer", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({"schema_version": 1, "started": name}))
        (tmp_path / name / "rows.jsonl").write_text(rows)
    assert find_run(tmp_path).name == "older"


def test_a_folder_without_runs_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no run in"):
        find_run(tmp_path)


def test_a_mistyped_folder_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    with pytest.raises(UsageError, match="did you mean 'results'"):
        find_run(tmp_path / "resluts")


# As a DataFrame


def test_the_frame_has_one_line_per_visit_with_integers_as_integers(five_rows: Path) -> None:
    data = frame(load_run(five_rows))
    assert len(data) == 5
    assert str(data["seq_q"].dtype) == "Int64"  # IO-06
    assert data["page_size"].isna().all()
    assert [list(samples) for samples in data["samples_ms"]] == [[1.0 + n, 2.0 + n] for n in range(5)]


def test_text_that_is_missing_or_reads_like_missing_stays_what_it_is(tmp_path: Path) -> None:
    # IO-01
    with create(tmp_path) as writer:
        writer.append(row(reason="NA", backend="null"), [1.0])
        writer.append(row(number=1), [1.0])
    data = frame(load_run(tmp_path))
    assert data["reason"].tolist() == ["NA", None]
    assert data["backend"].tolist() == ["null", None]


def test_a_row_without_measurements_has_no_numbers(tmp_path: Path) -> None:
    # IO-03
    with create(tmp_path) as writer:
        writer.append(row(status="unsupported", reason="head_dim 512 is above 256"))
    line = frame(load_run(tmp_path)).iloc[0]
    assert line["samples_ms"] is None
    for name in ("error_norm", "peak_bytes", "sm_clock_low_mhz", "sample_count", "seconds"):
        assert line.isna()[name]
