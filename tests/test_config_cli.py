"""`flashbench config`: the grammar, what a file means, a file to start from; and the workflow that runs the shipped ones."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from flashbench.config.axes import expand
from flashbench.config.load import load

ROOT = Path(__file__).parents[1]
WORKFLOW = ROOT / ".github" / "workflows" / "perf-gate.yml"


def test_the_schema_is_json_that_an_editor_can_use(cli) -> None:
    done = cli("config", "schema")
    assert done.returncode == 0
    schema = json.loads(done.stdout)
    assert {"providers", "problems", "measure", "gate"} <= schema["properties"].keys()
    assert schema["additionalProperties"] is False


def test_a_file_is_shown_with_every_default_and_means_the_same_again(cli, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "providers: [naive]\nproblems: {dtype: fp32, seq_len: 1k, head_dim: 64, heads: 8}\n"
    )
    (tmp_path / "mine.yaml").write_text("extends: base.yaml\ngate: {overrides: {'naive *': {margin: 4%}}}\n")
    shown = cli("config", "show", "mine.yaml")
    assert shown.returncode == 0, shown.stderr
    assert "min_samples: 20" in shown.stdout
    (tmp_path / "again.yaml").write_text(shown.stdout)
    assert load(tmp_path / "again.yaml").resolved() == load(tmp_path / "mine.yaml").resolved()


def test_the_cases_of_a_file_are_listed_by_key(cli, tmp_path: Path) -> None:
    text = "providers: [naive]\nproblems: {dtype: fp32, seq_len: [64, 96], head_dim: 32, heads: 2}\n"
    (tmp_path / "mine.yaml").write_text(text)
    shown = cli("config", "show", "mine.yaml", "--cases")
    assert shown.stdout.splitlines() == [f"naive forward fp32 b1 h2 s{seq} d32" for seq in (64, 96)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "mine.yaml"),
        ("providers: [naive]\n", "no problems"),
        ("provders: [naive]\n", "mine.yaml:1: unknown key 'provders'; did you mean 'providers'?"),
        (
            "providers: [naive]\nproblems: {dtype: fp32, seq_len: 64, head_dim: 32, heads: 2}\n"
            "gate:\n  overrides:\n    'flash *': {margin: 4%}\n",
            "mine.yaml:5: gate.overrides['flash *']: matches no case",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_code_2_with_its_line(cli, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    done = cli("config", "show", "mine.yaml")
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_the_template_runs_as_it_is_and_overwrites_nothing(cli, tmp_path: Path) -> None:
    assert cli("config", "init", "mine.yaml").returncode == 0
    assert len(expand(load(tmp_path / "mine.yaml")).cases) == 8
    (tmp_path / "mine.yaml").write_text("my own work")
    done = cli("config", "init", "mine.yaml")
    assert done.returncode == 2
    assert "'mine.yaml' is there already" in done.stderr
    assert (tmp_path / "mine.yaml").read_text() == "my own work"
    assert cli("config", "init").stdout.startswith("# yaml-language-server")


def test_what_the_template_has_commented_out_is_right_too(tmp_path: Path) -> None:
    template = (ROOT / "flashbench" / "config" / "template.yaml").read_text()
    keys = "name|exclude|include|l2|rounds|overrides"
    told = re.sub(rf"(?m)^# ((?:{keys}):)", lambda found: _indent(found[1]) + found[1], template)
    told = re.sub(r'(?m)^#   ("naive)', r"    \1", told)
    assert told.count("# name") == 0
    path = tmp_path / "all.yaml"
    path.write_text(told)
    config = load(path)
    assert config.measure.rounds == 6
    assert config.measure.l2 == "cold"
    assert config.gate.limits_for("naive forward fp32 b1 h8 s512 d64").margin == 0.04
    assert len(expand(config).cases) == 8 - 2 + 2


def _indent(key: str) -> str:
    return "  " if key in ("l2:", "rounds:", "overrides:") else ""


@pytest.mark.parametrize(("name", "cases"), [("ci", 30), ("ci-cpu", 12)])
def test_the_shipped_gates_are_of_the_size_that_their_time_allows(name: str, cases: int) -> None:
    config = load(ROOT / "configs" / f"{name}.yaml")
    assert len(expand(config).cases) == cases
    assert config.measure.max_seconds * cases * config.measure.round_count(gate=True) < 120


def _commands() -> list[str]:
    """Every flashbench command that the workflow runs."""
    jobs: dict[str, Any] = YAML(typ="safe").load(WORKFLOW.read_text())["jobs"]
    lines = [
        line.strip() for job in jobs.values() for step in job["steps"] for line in step.get("run", "").splitlines()
    ]
    return [line for line in lines if line.startswith("flashbench ")]


def test_the_workflow_gates_on_a_gpu_and_on_a_cpu() -> None:
    found = {tuple(shlex.split(line)[1:3]) for line in _commands()}
    assert {("gate", "configs/ci.yaml"), ("ab", "configs/ci.yaml"), ("ab", "configs/ci-cpu.yaml")} <= found


@pytest.mark.parametrize("command", _commands())
def test_a_command_of_the_workflow_runs(command: str, environment: dict[str, str], tmp_path: Path) -> None:
    words = [word.replace("$BASE_REF", "main") for word in shlex.split(command)]
    assert words[0] == "flashbench"
    done = subprocess.run(
        [sys.executable, "-m", *words, "--dry-run"],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not [word for word in words if word.endswith((".xml", ".json")) and (ROOT / word).exists()]


def test_the_workflow_keeps_what_its_commands_write() -> None:
    text = WORKFLOW.read_text()
    written = [
        words[i + 1] for words in map(shlex.split, _commands()) for i, word in enumerate(words) if word == "--out"
    ]
    assert written
    kept = [line.strip() for line in text.splitlines()]
    assert all(name in kept for name in written)


@pytest.mark.skipif(
    shutil.which("actionlint") is None and "ACTIONLINT" not in os.environ, reason="actionlint is not installed"
)
def test_the_workflow_passes_actionlint() -> None:
    tool = os.environ.get("ACTIONLINT", "actionlint")
    done = subprocess.run([tool, str(WORKFLOW)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
