"""Shared by all tests: a command-line runner in a child process, with a cache and threads of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

hypothesis.settings.register_profile("flashbench", deadline=None)
hypothesis.settings.load_profile("flashbench")

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def environment(cache_home: Path) -> dict[str, str]:
    """A child's environment: device records are cached between the tests of a session, and nowhere else."""
    return {**os.environ, "XDG_CACHE_HOME": str(cache_home), "COLUMNS": "200"}


@pytest.fixture
def cli(environment: dict[str, str], tmp_path: Path) -> Cli:
    """Run `flashbench ARGUMENTS` in a fresh folder, as a user would."""

    def run(*arguments: str, timeout: float = 240, **extra: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "flashbench", *arguments]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env={**environment, **extra},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run
