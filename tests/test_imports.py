"""Start-up is quick, because heavy libraries are imported where they are used; and imports point one way."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import flashbench

PACKAGE = Path(flashbench.__file__).parent
HEAVY = ("torch", "triton", "pydantic", "pandas", "scipy", "matplotlib", "numpy")
ORDER = (
    "records",
    "errors",
    "config",
    "hardware",
    "model",
    "store",
    "analysis",
    "report",
    "kernels",
    "providers",
    "measure",
    "run",
    "cli",
)


def loaded_by(code: str, modules: tuple[str, ...]) -> list[str]:
    check = f"{code}\nimport sys\nprint([m for m in {modules!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)
    found: list[str] = ast.literal_eval(done.stdout.splitlines()[-1])
    return found


def test_help_imports_nothing_heavy() -> None:
    code = "from flashbench.cli.main import app\ntry:\n    app(['--help'])\nexcept SystemExit:\n    pass"
    assert loaded_by(code, HEAVY) == []


def test_help_takes_under_400_ms_of_a_processor() -> None:
    """Its own time and not the clock's, which counts whatever else this machine does."""

    def once() -> float:
        before = os.times()
        subprocess.run([sys.executable, "-m", "flashbench", "--help"], capture_output=True, timeout=60, check=True)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(once() for _ in range(5)) < 0.4


def test_planning_and_the_table_of_providers_import_no_torch() -> None:
    code = "import flashbench.cli.sweeping, flashbench.cli.frames, flashbench.run.runner, flashbench.providers.table"
    assert loaded_by(code, ("torch", "triton")) == []


def test_importing_the_package_warns_of_nothing() -> None:
    # NV-06: the deprecated package `pynvml` warns at import, nvidia-ml-py does not.
    code = "import flashbench, flashbench.cli.main, pynvml"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down_the_list_of_layers(path: Path) -> None:
    layer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if layer not in ORDER:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("flashbench."):
            imported = node.module.split(".")[1]
            assert ORDER.index(imported) <= max(ORDER.index(layer), 1), f"{layer} imports {imported}"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_torch_is_imported_at_module_level_only_where_the_worker_runs(path: Path) -> None:
    layer = path.relative_to(PACKAGE).parts[0]
    if layer in ("kernels", "measure"):
        return
    for node in ast.parse(path.read_text()).body:
        names = (
            [node.module]
            if isinstance(node, ast.ImportFrom)
            else [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else []
        )
        assert not any(name and name.split(".")[0] in ("torch", "triton") for name in names)
