"""A sticky CUDA error takes its own case with it, and no other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def test_an_access_out_of_bounds_is_a_crashed_row_and_the_next_case_is_measured(cli, tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[1] / "fault_kernels.py", tmp_path / "fault_kernels.py")
    (tmp_path / "faults.yaml").write_text(
        "name: faults\ndevice: cuda\nproviders: [naive, 'fault_kernels.py:out_of_bounds', sdpa-math]\n"
        "problems: {dtype: fp16, seq_len: 256, head_dim: 64, heads: 2}\nmeasure: {max_seconds: 0.2}\n"
    )
    done = cli("sweep", "faults.yaml", "--out", "out")
    assert done.returncode == 4, done.stderr
    (path,) = (tmp_path / "out").rglob("rows.jsonl")
    rows = {row["case"]["provider"]: row for row in map(json.loads, path.read_text().splitlines())}
    assert rows["fault_kernels.py:out_of_bounds"]["status"] == "crashed"
    assert "CUDA" in rows["fault_kernels.py:out_of_bounds"]["reason"]
    assert rows["naive"]["status"] == rows["sdpa-math"]["status"] == "ok"


def test_energy_of_a_call_is_measured_when_asked_for(cli, tmp_path: Path) -> None:
    arguments = (
        "--provider",
        "sdpa-flash",
        "--seq-len",
        "4k",
        "--head-dim",
        "128",
        "--mask",
        "none",
        "--dtype",
        "bf16",
    )
    done = cli("sweep", *arguments, "--energy", "--out", "out")
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "out").rglob("rows.jsonl")
    row = json.loads(path.read_text())
    joules, seconds = row["energy_j"], 1.6e-3  # about what the call takes on an H200
    assert 50 < joules / seconds < 2000, "watts above idle"
