"""A provider may do anything: the sweep finishes, every other case is measured, and each row says what happened."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

FAULTS = Path(__file__).with_name("fault_kernels.py")

EXPECTED = {
    "raises": ("error", "ValueError: the kernel gave up"),
    "nan": ("incorrect", "out has 1 non-finite values"),
    "wrong": ("incorrect", "normwise error"),
    "one_wrong_row": ("incorrect", "largest error"),
    "other_shape": ("incorrect", "out has shape (1, 48, 2, 32), not (1, 2, 48, 32)"),
    "other_dtype": ("incorrect", "out has dtype float64, not float32"),
    "mutates": ("incorrect", "the provider changed its inputs"),
    "sleeps": ("timeout", "no answer within 20 s, in stage 'first call'"),
    "exits": ("crashed", "the worker exited with code 9"),
    "hungry": ("oom", "ran out of memory"),
    # KF-17: shared memory that the card does not have is a reason, and the sweep goes on.
    "too_large": (
        "unsupported",
        "the kernel does not fit this device: out of resource: shared memory, Required: 131072, Hardware limit: 101376",
    ),
}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    files = list(folder.rglob("rows.jsonl"))
    assert len(files) == 1
    return [json.loads(line) for line in files[0].read_text().splitlines()]


def write_config(folder: Path, providers: list[str], **problems: str) -> Path:
    shutil.copy(FAULTS, folder / "fault_kernels.py")
    names = ", ".join(p if p == "naive" else f"'fault_kernels.py:{p}'" for p in providers)
    axes = {"mode": "forward", "mask": "none", **problems}
    lines = "\n".join(f"  {name}: {value}" for name, value in axes.items())
    config = folder / "faults.yaml"
    config.write_text(
        f"version: 1\nname: faults\ndevice: cpu\nproviders: [{names}]\n"
        f"problems:\n  dtype: fp32\n  seq_len: 48\n  head_dim: 32\n  heads: 2\n{lines}\n"
        "measure: {min_samples: 5, max_seconds: 0.05, warmup_ms: 10, confidence_width: 20%, timeout_seconds: 20}\n"
    )
    return config


@pytest.fixture(scope="module")
def faulty_rows(tmp_path_factory: pytest.TempPathFactory, cache_home: Path) -> dict[str, dict[str, Any]]:
    """One sweep over every fault, with a right provider first, between and last."""
    import os
    import subprocess
    import sys

    folder = tmp_path_factory.mktemp("faults")
    providers = ["naive", *EXPECTED, "flaky", "prints", "right"]
    config = write_config(folder, providers)
    done = subprocess.run(
        [sys.executable, "-m", "flashbench", "sweep", str(config), "--out", "out"],
        cwd=folder,
        env={**os.environ, "XDG_CACHE_HOME": str(cache_home)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 4, done.stderr
    assert "Traceback" not in done.stderr
    return {row["case"]["provider"].rpartition(":")[2]: row for row in rows_of(folder / "out")}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_fault_becomes_a_row_that_says_what_happened(faulty_rows: dict[str, dict[str, Any]], name: str) -> None:
    status, words = EXPECTED[name]
    assert faulty_rows[name]["status"] == status
    assert words in faulty_rows[name]["reason"]
    assert "samples" not in faulty_rows[name], "no time is shown for a case that is not right"


def test_a_crash_keeps_the_last_words_of_the_process(faulty_rows: dict[str, dict[str, Any]]) -> None:
    assert "going away" in faulty_rows["exits"]["reason"]


def test_right_providers_around_the_faults_are_measured(faulty_rows: dict[str, dict[str, Any]]) -> None:
    for name in ("naive", "right", "prints"):
        assert faulty_rows[name]["status"] == "ok"
        assert faulty_rows[name]["samples"]["count"] >= 5


def test_a_round_that_went_on_in_a_new_worker_says_so(faulty_rows: dict[str, dict[str, Any]]) -> None:
    assert any("new worker" in warning for warning in faulty_rows["right"]["warnings"])


def test_an_output_that_differs_from_call_to_call_is_a_warning_with_its_size(
    faulty_rows: dict[str, dict[str, Any]],
) -> None:
    row = faulty_rows["flaky"]
    assert row["status"] == "ok"
    assert 0 < row["check"]["run_to_run_max"] < 1e-6
    assert any("differs from call to call" in warning for warning in row["warnings"])


def test_a_kernel_that_ignores_the_mask_gets_no_time(cli, tmp_path: Path) -> None:
    # FL-06: one provider always ran dense while the formula counted causal pairs.
    config = write_config(tmp_path, ["ignores_mask"], mask="causal")
    assert cli("sweep", str(config), "--out", "out").returncode == 4
    assert [row["status"] for row in rows_of(tmp_path / "out")] == ["incorrect"]


def test_wrong_gradients_behind_a_right_output_are_found(cli, tmp_path: Path) -> None:
    config = write_config(tmp_path, ["naive", "wrong_gradients"], mode="backward")
    assert cli("sweep", str(config), "--out", "out").returncode == 4
    naive, wrong = rows_of(tmp_path / "out")
    assert naive["status"] == "ok"
    assert (wrong["status"], wrong["reason"].split()[0]) == ("incorrect", "dk")


def test_a_kernel_of_an_installed_package_is_a_provider_by_its_entry_point(cli, tmp_path: Path) -> None:
    shutil.copy(FAULTS, tmp_path / "installed_kernels.py")
    metadata = tmp_path / "installed_kernels-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: installed-kernels\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[flashbench.providers]\ntheirs = installed_kernels:right\n")
    arguments = ("--provider", "theirs", "--seq-len", "33", "--head-dim", "16", "--mask", "none", "--device", "cpu")
    done = cli("sweep", *arguments, "--out", "out", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [(row["case"]["provider"], row["status"]) for row in rows_of(tmp_path / "out")] == [("theirs", "ok")]


def test_the_template_for_a_kernel_of_ones_own_works_as_printed(cli, tmp_path: Path) -> None:
    template = cli("providers", "--template")
    (tmp_path / "mine.py").write_text(template.stdout)
    arguments = ("--provider", "mine.py:attention", "--seq-len", "33,20/33,33/20", "--head-dim", "16", "--heads", "4/2")
    done = cli(
        "sweep", *arguments, "--mask", "none,causal,window:5", "--mode", "backward", "--device", "cpu", "--out", "out"
    )
    assert done.returncode == 0, done.stderr
    statuses = [row["status"] for row in rows_of(tmp_path / "out")]
    assert (statuses.count("ok"), statuses.count("unsupported")) == (7, 2)


def test_a_file_that_is_not_there_is_refused_before_anything_runs(cli) -> None:
    done = cli("sweep", "--provider", "nowhere.py:attention", "--device", "cpu")
    assert done.returncode == 2
    assert "there is no file 'nowhere.py'" in done.stderr


def test_a_function_that_is_not_in_the_file_names_those_that_are(cli, tmp_path: Path) -> None:
    config = write_config(tmp_path, ["rihgt"])
    assert cli("sweep", str(config), "--out", "out").returncode == 4
    (row,) = rows_of(tmp_path / "out")
    assert row["status"] == "error"
    assert "has no function 'rihgt' (it has:" in row["reason"]


def test_a_file_declares_which_byte_model_fits_it_without_being_run(tmp_path: Path) -> None:
    from flashbench.errors import UsageError
    from flashbench.providers.table import get

    kernel = tmp_path / "mine.py"
    name = f"{kernel}:attention"
    for text, algorithm in (
        ("raise SystemExit\nalgorithm = 'materialised'\n", "materialised"),
        ("raise SystemExit\n", "tiled-v2"),
        ("def broken(:\n", "tiled-v2"),
    ):
        kernel.write_text(text)
        assert get(name).algorithm == algorithm
    kernel.write_text("algorithm = 'materialized'\n")
    with pytest.raises(UsageError, match="did you mean 'materialised'"):
        get(name)
