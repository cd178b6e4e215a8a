"""Curves over the sequence length by what they draw."""

from __future__ import annotations

from typing import Any

import pytest
from metric_rows import H100, frame, row, sweep

from flashbench.errors import UsageError
from flashbench.report.curves import VIEWS, curves, notes, size_text

LENGTHS = (512, 1024, 2048, 16384)


def line(figure: Any, gid: str, panel: int = 0) -> list[tuple[float, float]]:
    (found,) = [line for line in figure.axes[panel].lines if line.get_gid() == gid]
    return [(float(x), float(y)) for x, y in zip(found.get_xdata(), found.get_ydata(), strict=True)]


def texts(figure: Any) -> str:
    return " | ".join(t.get_text() for t in [*figure.texts, *(t for axes in figure.axes for t in axes.texts)])


def test_lengths_stand_in_numeric_order_and_are_labelled_as_people_write_them() -> None:
    rows = sweep("sdpa-flash", lengths=LENGTHS)
    figure = curves(frame(*(rows[i] for i in (3, 0, 2, 1))))
    assert [x for x, _ in line(figure, "line sdpa-flash")] == list(LENGTHS)
    axes = figure.axes[0]
    shown = dict(zip(axes.get_xticks(), (t.get_text() for t in axes.get_xticklabels()), strict=True))
    assert shown == {512: "512", 1024: "1k", 2048: "2k", 16384: "16k"}
    assert axes.xaxis.get_transform().base == 2


def test_time_is_drawn_in_milliseconds_with_its_interval() -> None:
    rows = sweep("sdpa-flash", lengths=LENGTHS)
    figure = curves(frame(*rows), "time")
    assert [y for _, y in line(figure, "line sdpa-flash")] == [r["time_ms"] for r in rows]
    (band,) = [c for c in figure.axes[0].collections if c.get_gid() == "band sdpa-flash"]
    corners = {(float(x), float(y)) for x, y in band.get_paths()[0].vertices}
    assert {(r["seq_q"], r["time_low_ms"]) for r in rows} | {(r["seq_q"], r["time_high_ms"]) for r in rows} <= corners
    assert "ms" in figure.axes[0].get_ylabel()


def test_a_row_without_an_interval_has_a_point_and_no_band() -> None:
    figure = curves(frame(*(r | {"time_low_ms": None, "time_high_ms": None} for r in sweep("naive"))))
    assert not figure.axes[0].collections
    assert len(line(figure, "points naive")) == 3


def test_memory_is_labelled_in_binary_units() -> None:
    rows = [row("naive", n) | {"peak_net_bytes": n * 2**20} for n in (64, 512, 4096)]
    figure = curves(frame(*rows), "memory")
    assert [y for _, y in line(figure, "line naive")] == [64 * 2**20, 512 * 2**20, 4 * 2**30]
    labels = {t.get_text() for t in figure.axes[0].get_yticklabels()}
    assert {"64 MiB", "1 GiB"} <= labels


@pytest.mark.parametrize(
    ("size", "text"), [(512, "512 B"), (2**26, "64 MiB"), (2**34, "16 GiB"), (1536 * 2**20, "1.5 GiB")]
)
def test_sizes_are_written_in_the_largest_unit_that_keeps_them_above_one(size: int, text: str) -> None:
    assert size_text(size) == text


def test_traffic_is_drawn_in_decimal_gigabytes_between_its_bounds() -> None:
    rows = sweep("sdpa-flash")
    figure = curves(frame(*rows), "traffic")
    assert [y for _, y in line(figure, "line sdpa-flash")] == pytest.approx([r["hbm_bytes"] / 1e9 for r in rows])
    (band,) = [c for c in figure.axes[0].collections if c.get_gid() == "band sdpa-flash"]
    heights = [float(y) for _, y in band.get_paths()[0].vertices]
    assert min(heights) == pytest.approx(min(r["hbm_bytes_low"] for r in rows) / 1e9)
    assert max(heights) == pytest.approx(max(r["hbm_bytes_high"] for r in rows) / 1e9)
    assert "modelled" in figure.axes[0].get_ylabel()


def test_speedups_are_drawn_against_one_and_name_what_they_are_over() -> None:
    rows = [r | {"speedup": 4.0, "reference": "naive"} for r in sweep("sdpa-flash")]
    figure = curves(frame(*rows), "speedup")
    assert {y for _, y in line(figure, "line sdpa-flash")} == {4.0}
    assert {y for _, y in line(figure, "reference")} == {1.0}
    low, high = figure.axes[0].get_ylim()
    assert low < 1 < 4 < high
    assert "over naive" in figure.axes[0].get_ylabel()


def test_a_row_without_the_number_is_named_and_the_others_are_drawn() -> None:
    gone = row("naive", 4096) | {"peak_net_bytes": None}
    rows = frame(row("naive", 512), gone)
    assert notes(rows, "memory") == [f"not drawn: {gone['key']} (no peak memory)"]
    assert gone["key"] in texts(curves(rows, "memory"))


def test_the_length_at_which_a_provider_ran_out_of_memory_is_written_in_the_panel() -> None:
    gone = [row("naive", n) | {"status": "oom", "reason": "needs 90 GiB"} for n in (16384, 32768)]
    figure = curves(frame(*sweep("naive"), *sweep("sdpa-flash", lengths=LENGTHS), *gone), "memory")
    shown = [t.get_text() for t in figure.axes[0].texts]
    assert [t for t in shown if "out of memory" in t] == ["naive: out of memory at 16k"]


def test_batches_at_one_length_are_lines_of_their_own() -> None:
    rows = [r for b in (1, 8) for r in sweep("sdpa-flash", batch=b)]
    found = [li for li in curves(frame(*rows)).axes[0].lines if li.get_gid() == "line sdpa-flash"]
    assert [len(li.get_xdata()) for li in found] == [3, 3]


def test_a_fixed_number_of_tokens_is_one_line_and_said_in_the_footer() -> None:
    rows = [row("sdpa-flash", n, batch=16384 // n) for n in LENGTHS]
    figure = curves(frame(*rows))
    assert len(line(figure, "line sdpa-flash")) == 4
    assert "batch · length = 16k" in texts(figure)


def test_decoding_is_drawn_over_the_length_of_the_cache() -> None:
    rows = [row("sdpa-flash", n, 1.0, seq_q=1, mode="decode") for n in (1024, 8192)]
    assert [x for x, _ in line(curves(frame(*rows)), "line sdpa-flash")] == [1024, 8192]


@pytest.mark.parametrize("view", VIEWS)
def test_a_frame_without_a_row_to_draw_is_refused(view: str) -> None:
    with pytest.raises(UsageError, match=r"nothing to draw: none of the 1 rows .*crashed"):
        curves(frame(row("naive", 512) | {"status": "crashed", "reason": "exit code -11"}), view)


def test_an_unknown_view_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'memory'"):
        curves(frame(row("naive", 512)), "memroy")


def test_a_legend_of_several_lines_stands_clear_of_the_panels_titles() -> None:
    variants = [
        "bare",
        "overlap",
        "persistent",
        "dealt",
        "queue",
        "early-wait",
        "one-tile",
        "no-overlap",
        "no-pingpong",
    ]
    figure = curves(frame(*(each for name in variants for each in sweep(f"flash-v3:{name}"))))
    renderer = figure.canvas.get_renderer()
    (legend,) = figure.legends
    titles = [axes._left_title.get_window_extent(renderer) for axes in figure.axes]
    assert legend.get_window_extent(renderer).y0 > max(title.y1 for title in titles)


def test_the_title_names_view_and_device() -> None:
    assert f"Peak memory of attention on {H100}" in texts(curves(frame(row("naive", 512)), "memory"))
