"""`roofline` as a user calls it on stored runs: views, several devices, and mistakes told before anything is worked out."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from flashbench.cli import plots
from flashbench.errors import UsageError
from flashbench.hardware.ceilings import Ceiling, save
from flashbench.records import Case, Device, Memory, Row, Timing, to_plain
from flashbench.store.run import RunWriter

H200 = Device("cuda", "NVIDIA H200", 143_771 * 2**20, capability=(9, 0), sm_count=132, l2_bytes=60 << 20)
A100 = Device("cuda", "NVIDIA A100 80GB PCIe", int(79.15 * 2**30), capability=(8, 0), sm_count=108, l2_bytes=40 << 20)
TIMING = Timing("events", "cold", "isolated", 7, 100.0)


def stored(root: Path, device: Device, device_id: str, scale: float = 1.0) -> Path:
    """A run of two providers over four lengths."""
    cases = [
        Case.from_key(f"{provider} forward bf16 b{16384 // n} h16 s{n} d128")
        for provider in ("naive", "sdpa-flash")
        for n in (512, 1024, 4096, 16384)
    ]
    header = {"command": "flashbench sweep", "device": to_plain(device), "config": {}, "cases": [c.key for c in cases]}
    with RunWriter.create(root, device_id, "test", header) as writer:
        for case in cases:
            time_ms = scale * case.problem.seq_q / 4096 * (5.0 if case.provider == "naive" else 1.0)
            row = Row(case, 0, "ok", timing=TIMING, memory=Memory(2**28, 2**28 + 2**26))
            writer.append(row, [time_ms * (1 + i / 1000) for i in range(7)])
    save(
        root / device_id / "ceilings.json",
        device,
        [Ceiling("l2", None, "read", 5600.0, "GB/s", "measured", "isolated")],
    )
    return writer.path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return stored(tmp_path / "results", H200, "h200-sxm-141gb")


def draw(*arguments: str | Path) -> tuple[str, str]:
    app = typer.Typer()
    plots.register(app)
    app.command("other")(lambda: None)
    done = CliRunner().invoke(app, ["roofline", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    ("view", "words"),
    [
        ("time", "time of a call"),
        ("memory", "peak memory"),
        ("traffic", "HBM traffic"),
        ("speedup", "speed-up over naive"),
    ],
)
def test_each_view_is_a_curve_over_the_sequence_length(run: Path, tmp_path: Path, view: str, words: str) -> None:
    target = tmp_path / "curve.svg"
    draw(run, "--view", view, "--reference", "naive", "--out", target)
    picture = target.read_text()
    assert "sequence length" in picture
    assert words in picture


def test_a_picture_without_a_name_lies_beside_its_run_under_the_name_of_its_view(run: Path) -> None:
    assert draw(run, "--view", "time")[0].strip() == str(run / "time.png")
    assert (run / "time.png").exists()


def test_runs_of_two_devices_share_a_picture_each_under_its_own_ceilings(run: Path, tmp_path: Path) -> None:
    other = stored(tmp_path / "results", A100, "a100-pcie-80gb", scale=3)
    target = tmp_path / "two.svg"
    draw(run, other, "--out", target)
    picture = target.read_text()
    for words in ("on h200-sxm-141gb and a100-pcie-80gb", "sdpa-flash @ a100", "device of the @ lines"):
        assert words in picture
    draw(run, other, "--view", "time", "--out", target)
    assert "sdpa-flash @ a100" in target.read_text()


def test_the_hierarchical_form_draws_the_l2_of_the_device(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "levels.svg"
    draw(run, "--levels", "hbm,l2", "--out", target)
    assert "L2 of h200-sxm-141gb: 5,600 GB/s measured" in target.read_text()


def test_what_holds_a_point_back_is_printed_with_percentages(run: Path, tmp_path: Path) -> None:
    lines = draw(run, "--explain", "--out", tmp_path / "x.png")[0].splitlines()
    assert len(lines) == 8 + 1
    assert all("FLOP/byte" in line and "%" in line for line in lines[:-1])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "picture.txt"], "picture format"),
        (["--out", "no-folder/picture.png"], "does not exist"),
        (["--view", "speedup"], "--reference"),
        (["--view", "time", "--explain"], "--view"),
        (["--head-dim", "big"], "--head-dim"),
        (["--levels", "hbm,l3"], "known: hbm, l2"),
        (["--gpu", "a100"], "did you mean"),
        (["--provider", "flsh"], "the rows have"),
    ],
)
def test_a_mistake_is_a_usage_error_and_leaves_no_picture(run: Path, arguments: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        draw(run, *arguments)
    assert not list(run.glob("*.png"))


def test_a_wrong_ending_is_told_before_the_run_is_even_read() -> None:
    with pytest.raises(UsageError, match="picture format"):
        draw("nowhere", "--out", "picture.txt")
