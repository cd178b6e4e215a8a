"""Ceilings: measured once, kept beside the runs of a device, printed beside its data sheet."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from flashbench.cli import ceilings as cli
from flashbench.errors import StoreError, UsageError
from flashbench.hardware.ceilings import Ceiling, load, save
from flashbench.kernels.ceilings import BLOCK, READ_PROGRAMS_PER_SM, bytes_read_repeatedly
from flashbench.records import Device
from flashbench.run.ceilings import measure_and_save
from flashbench.run.devices import find_device

H200 = Device("cuda", "NVIDIA H200", 143_771 * 2**20, index=0, capability=(9, 0), sm_count=132, power_limit_w=700)


def run(*arguments: str) -> str:
    app = typer.Typer()
    cli.register(app)
    app.command("other")(lambda: None)
    done = CliRunner().invoke(app, ["ceilings", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Ceiling, ...], float]:
    """This machine's CPU, measured once for all tests of this file."""
    path = tmp_path_factory.mktemp("results") / "cpu" / "ceilings.json"
    stages: list[str] = []
    started = time.monotonic()
    found = measure_and_save(find_device("cpu"), path, stages.append)
    assert len(stages) == len(found)
    return path, found, time.monotonic() - started


def test_a_cpu_has_copy_read_write_and_a_product_each_above_nothing(measured) -> None:
    _, found, _ = measured
    assert [(c.level, c.kind, c.dtype) for c in found] == [
        ("hbm", "copy", None), ("hbm", "read", None), ("hbm", "write", None), ("compute", "gemm", "fp32"),
    ]  # fmt: skip
    assert all(c.value > 0 and c.source == "measured" and c.regime == "isolated" for c in found)


def test_what_was_measured_is_what_the_file_gives_back(measured) -> None:
    path, found, _ = measured
    device, stored = load(path)
    assert device.kind == "cpu"
    assert stored == found


def test_measuring_a_cpu_takes_seconds(measured) -> None:
    assert measured[2] < 60  # 20 s on a machine that does nothing else


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    started = time.monotonic()
    with pytest.raises(UsageError, match="--out"):
        measure_and_save(find_device("cpu"), tmp_path / "file" / "cpu" / "ceilings.json", lambda _: None)
    assert time.monotonic() - started < 1


def h200(*ceilings: Ceiling) -> list[list[str]]:
    return cli.rows(H200, ceilings)


def gemm(value: float, regime: str, clock: float, power: float) -> Ceiling:
    return Ceiling("compute", "bf16", "gemm", value, "TFLOP/s", "measured", regime, clock, power)  # type: ignore[arg-type]


def test_both_regimes_stand_in_one_row_with_the_share_of_the_data_sheet_and_their_clocks() -> None:
    (row,) = h200(gemm(782.4, "isolated", 1980, 410), gemm(690.2, "sustained", 1500, 699))
    assert row == ["compute", "gemm", "bf16", "782.4", "690.2", "989.4", "79 %", "TFLOP/s", "1980 / 1500", "410 / 699"]


def test_what_no_data_sheet_gives_has_no_share() -> None:
    (row,) = h200(Ceiling("launch", None, "empty", 2.1, "us", "measured", "isolated"))
    assert row == ["launch", "empty", "", "2.1", "-", "-", "-", "us", "-", "-"]


def test_stored_ceilings_are_shown_without_measuring(tmp_path: Path) -> None:
    device = find_device("cpu")
    with pytest.raises(StoreError, match="measure"):
        run("--show", "--device", "cpu", "--out", str(tmp_path))
    from flashbench.run.ceilings import ceilings_path

    save(ceilings_path(tmp_path, device), device, [Ceiling("hbm", None, "copy", 12.34, "GB/s", "measured", "isolated")])
    assert "12.34" in run("--show", "--device", "cpu", "--out", str(tmp_path))
    text = run("--show", "--device", "cpu", "--out", str(tmp_path), "--json")
    assert json.loads(text[: text.rindex("]") + 1])[0]["value"] == 12.34


def test_the_bytes_read_from_the_l2_are_whole_blocks_shared_evenly() -> None:
    programs = READ_PROGRAMS_PER_SM * 132
    assert bytes_read_repeatedly(programs * BLOCK, 20, 132) == 20 * programs * BLOCK * 4
    assert bytes_read_repeatedly(programs * BLOCK + BLOCK // 2, 1, 132) == programs * BLOCK * 4
    assert bytes_read_repeatedly(BLOCK, 1, 132) == 0
