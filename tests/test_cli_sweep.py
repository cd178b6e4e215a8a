"""The sweep from end to end, as a user runs it on a machine without a GPU."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

TINY = """
version: 1
name: tiny
device: cpu
providers: [naive, sdpa-flash, sdpa-cudnn]
problems: {dtype: fp32, seq_len: [64, 96], head_dim: 32, heads: 2, mask: [none, causal]}
measure: {min_samples: 5, max_seconds: 0.05, warmup_ms: 10, confidence_width: 20%}
"""


def write(folder: Path, text: str = TINY) -> str:
    (folder / "tiny.yaml").write_text(text)
    return "tiny.yaml"


def rows_in(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.rglob("rows.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_sweep_ends_in_rows_a_table_and_a_next_step(cli, tmp_path: Path) -> None:
    done = cli("sweep", write(tmp_path), "--out", "out")
    assert done.returncode == 0, done.stderr
    rows = rows_in(tmp_path / "out")
    assert [row["status"] for row in rows].count("ok") == 8
    refused = [row for row in rows if row["status"] == "unsupported"]
    assert len(refused) == 4
    assert all("no cudnn backend" in row["reason"] for row in refused)
    assert done.stdout.count("naive") == 4
    assert "Traceback" not in done.stderr
    assert "flashbench roofline" in done.stderr
    measured = next(row for row in rows if row["status"] == "ok")
    assert measured["check"]["error_norm"] < 1e-5
    assert measured["timing"]["sample_count"] == measured["samples"]["count"] >= 5
    assert measured["memory"]["peak_bytes"] > 0


def test_results_are_read_without_a_gpu_and_drawn_with_ridges(cli, tmp_path: Path) -> None:
    assert cli("sweep", write(tmp_path), "--out", "out", "--provider", "naive").returncode == 0
    shown = cli("show", "out", "--format", "csv")
    assert shown.returncode == 0, shown.stderr
    assert len(shown.stdout.splitlines()) == 5
    drawn = cli("roofline", "out", "--out", "figure.svg", DISPLAY="localhost:64.0", MPLBACKEND="TkAgg")
    assert drawn.returncode == 0, drawn.stderr
    picture = (tmp_path / "figure.svg").read_text()
    assert "161" in picture
    assert "295" in picture


def test_a_dry_run_prints_cases_reasons_and_an_estimate_and_runs_nothing(cli, tmp_path: Path) -> None:
    done = cli("sweep", write(tmp_path), "--dry-run")
    assert done.returncode == 0
    assert "8 cases" in done.stdout
    assert "4 unsupported" in done.stdout
    assert "about" in done.stdout
    assert not (tmp_path / "results").exists()


def test_a_case_that_cannot_fit_is_oom_without_being_run(cli, tmp_path: Path) -> None:
    arguments = ("--provider", "naive", "--seq-len", "512k", "--heads", "16", "--head-dim", "64", "--device", "cpu")
    done = cli("sweep", *arguments, "--out", "out", timeout=60)
    assert done.returncode == 0, done.stderr
    (row, *_) = rows_in(tmp_path / "out")
    assert row["status"] == "oom"
    assert row["reason"].startswith("predicted: needs")


def test_a_reproduction_runs_one_case_by_its_key(cli, tmp_path: Path) -> None:
    key = "naive forward fp32 b1 h4/2 s5/9 d16 window:3"
    done = cli("sweep", "--repro", key, "--device", "cpu", "--out", "out")
    assert done.returncode == 0, done.stderr
    assert [(row["key"], row["status"]) for row in rows_in(tmp_path / "out")] == [(key, "ok")]


def test_a_reproduction_is_measured_as_its_configuration_says(cli, tmp_path: Path) -> None:
    done = cli("sweep", write(tmp_path), "--repro", "naive forward fp32 b1 h2 s64 d32", "--l2", "cold", "--out", "out")
    assert done.returncode == 0, done.stderr
    (header,) = (tmp_path / "out").rglob("run.json")
    measure = json.loads(header.read_text())["config"]["measure"]
    assert (measure["confidence_width"], measure["l2"]) == (0.2, "cold")


def test_the_words_of_an_exception_reach_the_table_whatever_brackets_they_hold(cli, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def attention(q, k, v, **_):\n    raise ValueError('[/x] wants [batch, heads]')\n"
    )
    done = cli("sweep", write(tmp_path), "--provider", "mine.py:attention", "--seq-len", "64", "--out", "out")
    assert done.returncode == 4
    assert "[/x] wants [batch, heads]" in done.stdout
    assert "internal error" not in done.stderr


def test_the_check_alone_times_nothing(cli, tmp_path: Path) -> None:
    assert cli("sweep", write(tmp_path), "--check-only", "--provider", "naive", "--out", "out").returncode == 0
    assert {(row["status"], "samples" in row) for row in rows_in(tmp_path / "out")} == {("checked", False)}


def test_the_projects_kernel_is_checked_under_the_interpreter(cli, tmp_path: Path) -> None:
    arguments = ("--provider", "flash-v2", "--seq-len", "48", "--head-dim", "16", "--heads", "2", "--dtype", "fp32")
    done = cli("sweep", *arguments, "--device", "cpu", "--out", "out", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr + done.stdout
    assert {row["status"] for row in rows_in(tmp_path / "out")} == {"checked"}


def test_backward_is_checked_by_its_gradients_and_timed(cli, tmp_path: Path) -> None:
    arguments = ("--provider", "naive,tiled,sdpa-math", "--seq-len", "40", "--mode", "backward,forward_backward")
    done = cli("sweep", write(tmp_path), *arguments, "--out", "out")
    assert done.returncode == 0, done.stderr + done.stdout
    rows = rows_in(tmp_path / "out")
    assert len(rows) == 12
    assert {row["status"] for row in rows} == {"ok"}


def test_rounds_visit_every_case_in_fresh_processes_in_another_order(cli, tmp_path: Path) -> None:
    done = cli("sweep", write(tmp_path), "--provider", "naive,sdpa-flash", "--rounds", "3", "--out", "out")
    assert done.returncode == 0, done.stderr
    rows = rows_in(tmp_path / "out")
    orders = [[row["key"] for row in rows if row["round"] == index] for index in range(3)]
    assert [len(order) for order in orders] == [8, 8, 8]
    assert len({tuple(order) for order in orders}) > 1
    assert len({tuple(sorted(order)) for order in orders}) == 1


def test_an_interrupted_sweep_keeps_its_rows_and_goes_on(environment, cli, tmp_path: Path) -> None:
    write(tmp_path)
    started = _start(environment, tmp_path, "sweep", "tiny.yaml", "--out", "out")
    _wait_for_rows(tmp_path / "out", 5)
    started.send_signal(signal.SIGTERM)
    _, stderr = started.communicate(timeout=30)
    assert started.returncode == 130
    assert "--resume" in stderr
    before = rows_in(tmp_path / "out")
    resumed = cli("sweep", "--resume", "out")
    assert resumed.returncode == 0, resumed.stderr
    after = rows_in(tmp_path / "out")
    assert after[: len(before)] == before
    assert len(after) == 12


def test_twenty_interruptions_lose_no_finished_row_and_nothing_is_measured_twice(
    environment, cli, tmp_path: Path
) -> None:
    write(tmp_path)
    moments = random.Random(7)
    command = ("sweep", "tiny.yaml", "--out", "out")
    seen: list[str] = []
    for attempt in range(20):
        started = _start(environment, tmp_path, *command)
        time.sleep(moments.uniform(0.1, 3.5))
        started.send_signal((signal.SIGKILL, signal.SIGTERM, signal.SIGINT)[attempt % 3])
        started.communicate(timeout=60)
        files = list((tmp_path / "out").rglob("rows.jsonl"))
        if files:
            command = ("sweep", "--resume", "out")
            complete = files[0].read_text().split("\n")[:-1]
            assert complete[: len(seen)] == seen, "a finished row changed or went missing"
            for line in complete:
                json.loads(line)
            seen = complete
    done = cli(*command)
    assert done.returncode == 0, done.stderr
    keys = [row["key"] for row in rows_in(tmp_path / "out")]
    assert len(keys) == len(set(keys)) == 12


def test_a_disk_that_fills_up_is_told_and_what_was_measured_stays(environment, cli, tmp_path: Path) -> None:
    write(tmp_path)
    limit = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)); sys.argv = ['flashbench', *sys.argv[1:]]; runpy.run_module('flashbench', run_name='__main__')"
    full = subprocess.run(
        [sys.executable, "-c", limit, "sweep", "tiny.yaml", "--provider", "naive,tiled,sdpa-math", "--out", "out"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert full.returncode == 3, full.stderr
    assert "go on with --resume" in full.stderr
    assert "Traceback" not in full.stderr
    kept = rows_in(tmp_path / "out")
    assert 1 <= len(kept) < 12
    resumed = cli("sweep", "--resume", "out")
    assert resumed.returncode == 0, resumed.stderr
    assert rows_in(tmp_path / "out")[: len(kept)] == kept
    assert len(rows_in(tmp_path / "out")) == 12


def test_two_sweeps_into_one_folder_do_not_mix(environment, tmp_path: Path) -> None:
    write(tmp_path)
    both = [
        _start(environment, tmp_path, "sweep", "tiny.yaml", "--provider", "naive", "--out", "out") for _ in range(2)
    ]
    for started in both:
        _, stderr = started.communicate(timeout=120)
        assert started.returncode == 0, stderr
    files = list((tmp_path / "out").rglob("rows.jsonl"))
    assert len(files) == 2
    assert all(len(path.read_text().splitlines()) == 4 for path in files)


def test_a_run_that_is_being_written_cannot_be_resumed_by_another(environment, cli, tmp_path: Path) -> None:
    write(tmp_path)
    started = _start(environment, tmp_path, "sweep", "tiny.yaml", "--out", "out")
    _wait_for_rows(tmp_path / "out", 1)
    second = cli("sweep", "--resume", "out")
    started.communicate(timeout=120)
    assert second.returncode == 2
    assert f"being written by process {started.pid}" in second.stderr


def _start(environment: dict[str, str], folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "flashbench", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait_for_rows(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        files = list(folder.rglob("rows.jsonl"))
        if files and files[0].read_text().count("\n") >= count:
            return
        time.sleep(0.05)
    raise AssertionError(f"no {count} rows within 100 s")


def test_a_worker_ends_when_its_parent_is_killed(environment, tmp_path: Path) -> None:
    write(tmp_path)
    started = _start(environment, tmp_path, "sweep", "tiny.yaml", "--out", "out")
    _wait_for_rows(tmp_path / "out", 5)
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    started.kill()
    started.communicate()
    deadline = time.monotonic() + 20
    while any(_alive(int(child)) for child in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert children
    assert not any(_alive(int(child)) for child in children)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--provider", "flsh"], "did you mean 'flash-v2'"),
        (["--dtype", "bf61"], "did you mean 'bf16'"),
        (["--mask", "casual"], "did you mean 'causal'"),
        (["--mode", "foward"], "did you mean 'forward'"),
        (["--seq-len", "-512"], "--seq-len"),
        (["--seq-len", "1.5k"], "--seq-len"),
        (["--seq-len", ""], "--seq-len"),
        (["--head-dim", "32:8"], "--head-dim"),
        (["--device", "cuda"], "no CUDA GPU can be used here"),
        (["--device", "gpu"], "--device"),
        (["missing.yaml"], "missing.yaml"),
        (["."], "folder"),
        (["binary.yaml"], "binary.yaml"),
        (["list.yaml"], "list.yaml:1"),
        (["twice.yaml"], "twice.yaml:2"),
        (["unknown.yaml"], "did you mean 'providers'"),
        (["--out", "file.txt"], "file.txt"),
        (["--repro", "naive forward fp32 b1 h2 s64 d32", "--seq-len", "4k"], "leave out --seq-len"),
        (["--resume", "nowhere"], "nowhere"),
        (["--repro", "nonsense"], "not a case key"),
        (["--frobnicate"], "No such option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_user_error_is_one_clear_line_and_exit_code_2(cli, tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "binary.yaml").write_bytes(bytes(range(256)))
    (tmp_path / "list.yaml").write_text("- naive\n- tiled\n")
    (tmp_path / "twice.yaml").write_text("providers: [naive]\nproviders: [tiled]\n")
    (tmp_path / "unknown.yaml").write_text("provders: [naive]\n")
    (tmp_path / "file.txt").write_text("not a folder")
    done = cli("sweep", *arguments)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    if "--frobnicate" not in arguments:
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not list(tmp_path.rglob("rows.jsonl")), "nothing was run"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_folder_is_refused_before_anything_runs(cli, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    done = cli("sweep", write(tmp_path), "--out", "locked")
    assert done.returncode == 2
    assert "--out" in done.stderr


def test_an_unknown_gpu_is_refused_with_the_nearest(cli, tmp_path: Path) -> None:
    assert cli("sweep", write(tmp_path), "--provider", "naive", "--out", "out").returncode == 0
    done = cli("roofline", "out", "--gpu", "h100-sxm-80gb")
    assert done.returncode == 2
    assert "did you mean 'h100-sxm5-80gb'" in done.stderr


def test_energy_without_a_counter_is_a_warning_and_no_number(cli, tmp_path: Path) -> None:
    done = cli("sweep", write(tmp_path), "--provider", "naive", "--seq-len", "64", "--energy", "--out", "out")
    assert done.returncode == 0, done.stderr
    for row in rows_in(tmp_path / "out"):
        assert "energy_j" not in row
        assert "no energy counter can be read here" in row["warnings"]


def test_a_resumed_check_still_times_nothing(environment, cli, tmp_path: Path) -> None:
    write(tmp_path)
    started = _start(environment, tmp_path, "sweep", "tiny.yaml", "--check-only", "--out", "out")
    _wait_for_rows(tmp_path / "out", 5)
    started.send_signal(signal.SIGTERM)
    started.communicate(timeout=30)
    assert cli("sweep", "--resume", "out").returncode == 0
    assert {row["status"] for row in rows_in(tmp_path / "out")} == {"checked", "unsupported"}


def test_a_run_whose_header_is_not_whole_cannot_be_resumed(cli, tmp_path: Path) -> None:
    folder = tmp_path / "out" / "device" / "run"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(
        '{"schema_version": 1, "started": "2026-01-01T00:00:00Z", "config": {"nonsense": 1}}'
    )
    done = cli("sweep", "--resume", "out")
    assert done.returncode == 3
    assert "does not say what is missing" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_bf16_is_unsupported_where_the_interpreter_gets_it_wrong(cli, tmp_path: Path) -> None:
    # KF-14: not a numerical failure of the kernel.
    arguments = ("--provider", "flash-v2", "--seq-len", "16", "--head-dim", "16", "--heads", "1", "--mask", "none")
    done = cli("sweep", *arguments, "--dtype", "bf16,fp16", "--device", "cpu", "--out", "out", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    statuses = {row["case"]["problem"]["dtype"]: row["status"] for row in rows_in(tmp_path / "out")}
    assert statuses["fp16"] == "checked"
    assert statuses["bf16"] in ("unsupported", "checked"), "checked where a later Triton has it right"
