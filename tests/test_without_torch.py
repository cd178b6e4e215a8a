"""NV-08: a machine without Triton, or without torch at all, reads results, draws rooflines and loads configurations."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

BLOCKER = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def flashbench(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`flashbench ARGUMENTS` where the modules `absent` cannot be imported, in the worker neither, over one folder."""
    folder = tmp_path_factory.mktemp("machine")

    def run(*arguments: str, absent: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        site = folder / ("without-" + "-".join(absent))
        site.mkdir(exist_ok=True)
        (site / "sitecustomize.py").write_text(BLOCKER.format(absent=absent))
        environment = {**os.environ, "PYTHONPATH": str(site), "XDG_CACHE_HOME": str(site), "COLUMNS": "200"}
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, "-m", "flashbench", *arguments]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
        )

    (folder / "tiny.yaml").write_text(
        "version: 1\nname: tiny\ndevice: cpu\nproviders: [naive]\n"
        "problems: {dtype: fp32, seq_len: 64, head_dim: 32, heads: 2}\n"
        "measure: {min_samples: 5, max_seconds: 0.05, warmup_ms: 10, confidence_width: 20%}\n"
    )
    return run


@pytest.fixture(scope="module")
def sweep_without_triton(flashbench: Run) -> subprocess.CompletedProcess[str]:
    return flashbench("sweep", "tiny.yaml", "--out", "out", absent=("triton",))


def test_a_cpu_is_measured_without_triton(sweep_without_triton: subprocess.CompletedProcess[str]) -> None:
    assert sweep_without_triton.returncode == 0, sweep_without_triton.stderr
    assert "naive" in sweep_without_triton.stdout


@pytest.mark.usefixtures("sweep_without_triton")
@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("sweep", "--help"),
        ("show", "out"),
        ("roofline", "out", "--out", "figure.svg"),
        ("gpus",),
        ("doctor",),
    ],
    ids=" ".join,
)
def test_what_measures_nothing_works_without_torch_and_triton(flashbench: Run, arguments: tuple[str, ...]) -> None:
    done = flashbench(*arguments, absent=("torch", "triton"))
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_a_configuration_is_loaded_without_torch_and_triton(flashbench: Run) -> None:
    # A fault in the file is found before anything asks for a device.
    done = flashbench("sweep", "tiny.yaml", "--seq-len", "many", absent=("torch", "triton"))
    assert done.returncode == 2
    assert "many" in done.stderr


def test_a_sweep_without_torch_says_so_in_one_line(flashbench: Run) -> None:
    done = flashbench("sweep", "tiny.yaml", absent=("torch", "triton"))
    assert done.returncode != 0
    assert "No module named 'torch'" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
