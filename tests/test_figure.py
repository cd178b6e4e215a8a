"""What all pictures share: looks, numbers, saving, and no need for a display."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from metric_rows import H100, frame, machine, row, sweep

from flashbench.errors import UsageError
from flashbench.report.curves import curves
from flashbench.report.figure import length_text, number_text, save
from flashbench.report.looks import PROVIDER_LOOKS, provider_looks
from flashbench.report.points import short_names
from flashbench.report.roofline import roofline

MAGIC = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


def test_a_provider_looks_the_same_whoever_is_beside_it() -> None:
    alone, beside = provider_looks(["sdpa-flash"]), provider_looks(["mine", "naive", "sdpa-flash"])
    assert alone["sdpa-flash"] == beside["sdpa-flash"] == PROVIDER_LOOKS["sdpa-flash"]


def test_no_two_providers_of_a_picture_look_alike() -> None:
    names = [*PROVIDER_LOOKS, *(f"mine-{i}" for i in range(20))]
    assert len(set(provider_looks(names).values())) == len(names)


def test_a_provider_on_a_second_device_keeps_its_colour_and_gets_dashes_of_its_own() -> None:
    looks = provider_looks(["naive", "sdpa-flash", "sdpa-flash @ a100", "mine @ a100", "sdpa-flash @ h200"])
    here, there, third = (looks[name] for name in ("sdpa-flash", "sdpa-flash @ a100", "sdpa-flash @ h200"))
    assert here.colour == there.colour == third.colour
    assert len({here.dashes, there.dashes, third.dashes}) == 3
    assert len(set(looks.values())) == len(looks)


@pytest.mark.parametrize(
    ("devices", "names"),
    [
        (["h100-sxm5-80gb", "a100-pcie-80gb"], ["h100", "a100"]),
        (["a100-sxm4-80gb", "a100-pcie-80gb"], ["a100-sxm4", "a100-pcie"]),
        (["a100-sxm4-80gb", "a100-sxm4-40gb"], ["a100-sxm4-80gb", "a100-sxm4-40gb"]),
        (["cpu"], ["cpu"]),
    ],
)
def test_devices_are_named_by_as_many_words_as_tell_them_apart(devices: list[str], names: list[str]) -> None:
    assert list(short_names(devices).values()) == names


@pytest.mark.parametrize(
    ("length", "text"), [(1, "1"), (512, "512"), (1000, "1000"), (1024, "1k"), (131072, "128k"), (1500, "1500")]
)
def test_lengths_read_as_people_write_them(length: int, text: str) -> None:
    assert length_text(length) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.0473, "0.0473"), (4.8, "4.80"), (20.97, "21.0"), (295.3, "295"), (1978.9, "1,979")]
)
def test_numbers_have_three_digits_and_no_exponent(value: float, text: str) -> None:
    assert number_text(value) == text


@pytest.mark.parametrize("ending", MAGIC)
def test_a_figure_is_written_in_the_format_of_its_ending_and_the_same_bytes_each_time(
    tmp_path: Path, ending: str
) -> None:
    rows, own = frame(*sweep("sdpa-flash")), machine(H100, True)
    first, second = tmp_path / f"a.{ending}", tmp_path / f"b.{ending}"
    save(roofline(rows, [own]), first)
    save(roofline(rows, [own]), second)
    assert first.read_bytes().startswith(MAGIC[ending])
    assert first.read_bytes() == second.read_bytes()


def test_another_ending_is_refused_with_those_that_work(tmp_path: Path) -> None:
    figure = curves(frame(row("naive", 512)))
    with pytest.raises(UsageError, match=r"did you mean 'png'.*\.png, \.svg, \.pdf"):
        save(figure, tmp_path / "picture.pngg")
    with pytest.raises(UsageError, match="does not end in a picture format"):
        save(figure, tmp_path / "picture")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere.* does not exist"):
        save(curves(frame(row("naive", 512))), tmp_path / "nowhere" / "a.png")


def test_a_file_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "a.png").mkdir()
    with pytest.raises(UsageError, match=r"cannot write .*a\.png"):
        save(curves(frame(row("naive", 512))), tmp_path / "a.png")


@pytest.mark.parametrize("backend", [None, "TkAgg"])
def test_pictures_need_no_display_and_no_pyplot(tmp_path: Path, backend: str | None) -> None:
    # RO-09: a dead display, and a backend that would ask for it
    program = (
        "import sys\n"
        "from metric_rows import H100, frame, machine, sweep\n"
        "from flashbench.report.figure import save\n"
        "from flashbench.report.roofline import roofline\n"
        "save(roofline(frame(*sweep('naive')), [machine(H100, True)]), sys.argv[1])\n"
        "assert 'matplotlib.pyplot' not in sys.modules and 'tkinter' not in sys.modules\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    environment = {k: v for k, v in os.environ.items() if k != "MPLBACKEND"} | {
        "DISPLAY": "localhost:64.0",
        "PYTHONPATH": path,
    }
    if backend:
        environment["MPLBACKEND"] = backend
    target = tmp_path / "a.png"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, str(target)], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert target.stat().st_size > 10_000


def test_many_figures_leave_nothing_behind(tmp_path: Path) -> None:
    # RO-10: warnings are errors in this suite; a figure that nobody holds is gone
    import gc
    import weakref

    figures = [weakref.ref(curves(frame(row("naive", 512)))) for _ in range(25)]
    gc.collect()
    assert [figure() for figure in figures if figure() is not None] == []


def test_a_users_matplotlibrc_does_not_change_the_picture(tmp_path: Path) -> None:
    import matplotlib as mpl

    rows = frame(*sweep("naive"))
    save(curves(rows), tmp_path / "plain.png")
    with mpl.rc_context({"font.size": 30, "axes.grid": True, "lines.linewidth": 9}):
        save(curves(rows), tmp_path / "theirs.png")
    assert (tmp_path / "plain.png").read_bytes() == (tmp_path / "theirs.png").read_bytes()


def test_building_a_picture_leaves_the_settings_of_matplotlib_alone() -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    curves(frame(row("naive", 512)))
    assert dict(mpl.rcParams) == before
