"""The roofline by what it draws: points, ceilings, ridges, labels, and what it says of rows that it cannot draw."""

from __future__ import annotations

import math
from typing import Any

import pytest
from metric_rows import A100, H100, frame, machine, measured, row, sweep

from flashbench.errors import UsageError
from flashbench.hardware.ceilings import Ceiling
from flashbench.report.points import narrow
from flashbench.report.roofline import roofline
from flashbench.report.roofline_text import explain, notes
from flashbench.report.roofs import Machine, exp_roof, roof

OWN = machine(H100, True)


def lines(figure: Any, gid: str, panel: int = 0) -> list[Any]:
    return [line for line in figure.axes[panel].lines if (line.get_gid() or "").startswith(gid)]


def data(line: Any) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]


def texts(figure: Any) -> list[str]:
    return [text.get_text() for text in [*figure.texts, *(t for axes in figure.axes for t in axes.texts)]]


def footer(figure: Any) -> str:
    return " ".join(text.get_text() for text in figure.texts if text.get_gid() == "footer")


def test_every_point_stands_at_its_intensity_and_useful_tflops() -> None:
    rows = sweep("sdpa-flash")
    (points,) = lines(roofline(frame(*rows), [OWN]), "points sdpa-flash")
    assert data(points) == [(r["intensity"], r["tflops"]) for r in rows]


def test_a_line_joins_the_lengths_in_numeric_order_whatever_the_order_of_rows() -> None:
    rows = sweep("sdpa-flash", lengths=(512, 1024, 2048, 4096, 16384))
    (line,) = lines(roofline(frame(*(rows[i] for i in (4, 1, 3, 0, 2))), [OWN]), "line sdpa-flash")
    assert data(line) == [(r["intensity"], r["tflops"]) for r in rows]


def test_the_ends_of_a_line_are_labelled_with_their_lengths() -> None:
    shown = texts(roofline(frame(*sweep("sdpa-flash", lengths=(512, 1024, 16384))), [OWN]))
    assert "N = 512" in shown
    assert "16k" in shown
    assert not {"1k", "N = 1k"} & set(shown)


def test_an_uncertain_intensity_is_drawn_as_an_interval() -> None:
    one = row("sdpa-flash", 1024)
    (bar,) = lines(roofline(frame(one), [OWN]), "interval")
    assert data(bar) == [(one["intensity_low"], one["tflops"]), (one["intensity_high"], one["tflops"])]


@pytest.mark.parametrize(("gpu", "ridge"), [(A100, 161), (H100, 295)])
def test_the_ridge_is_marked_and_numbered(gpu: str, ridge: int) -> None:
    figure = roofline(frame(*sweep("sdpa-flash", 100, device_id=gpu)), [machine(gpu, True)])
    ((dot,),) = (data(line) for line in lines(figure, "ridge"))
    assert round(dot[0]) == ridge
    assert f"ridge {ridge}" in texts(figure)


def test_decades_are_square() -> None:
    axes = roofline(frame(*sweep("sdpa-flash"), *sweep("naive", 20)), [OWN]).axes[0]
    box = axes.get_window_extent()
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    assert box.width / math.log10(right / left) == pytest.approx(box.height / math.log10(high / low))


def test_data_sheet_ceilings_are_solid_and_measured_ones_dashed_and_both_say_their_value() -> None:
    own = machine(H100, True, measured("hbm", 2900), measured("compute", 700, "bf16"))
    figure = roofline(frame(*sweep("sdpa-flash")), [own])
    assert {line.get_linestyle() for line in lines(figure, f"peak {H100} spec")} == {"-"}
    assert {line.get_linestyle() for line in lines(figure, f"bandwidth {H100} spec")} == {"-"}
    assert {line.get_linestyle() for line in lines(figure, f"peak {H100} measured")} == {"--"}
    assert {line.get_linestyle() for line in lines(figure, f"bandwidth {H100} measured")} == {"--"}
    shown = " | ".join(texts(figure))
    for words in ("989  bf16 spec", "700  bf16 measured", "3,350 GB/s spec", "2,900 measured"):
        assert words in shown


def test_a_bandwidth_line_rises_with_the_bandwidth_and_ends_at_the_ridge() -> None:
    (line,) = lines(roofline(frame(*sweep("sdpa-flash")), [OWN]), f"bandwidth {H100}")
    (x0, y0), (x1, y1) = data(line)
    assert y0 / x0 == pytest.approx(3.350)
    assert (x1, y1) == pytest.approx((989.4 / 3.350, 989.4))


def test_measured_ceilings_are_those_of_the_rows_own_load_regime() -> None:
    isolated, sustained = measured("compute", 700, "bf16"), measured("compute", 600, "bf16", regime="sustained")
    own = machine(H100, True, isolated, sustained)
    assert roof(own, "bf16", "measured", "sustained").peak_tflops == 600
    assert roof(own, "bf16", "measured", "isolated").peak_tflops == 700
    figure = roofline(frame(*sweep("sdpa-flash", regime="sustained")), [own])
    assert [data(line)[0][1] for line in lines(figure, f"peak {H100} measured")] == [600]


def test_the_ceilings_of_another_device_are_named_grey_and_not_the_own() -> None:
    figure = roofline(frame(*sweep("sdpa-flash")), [OWN, machine(A100)])
    (other,), (own,) = lines(figure, f"peak {A100}"), lines(figure, f"peak {H100}")
    assert data(other)[0][1] == 312
    assert other.get_color() != own.get_color()
    shown = texts(figure)
    assert shown.count("not this device") == 1
    assert f"312  {A100}" in shown
    assert {"ridge 161", "ridge 295"} <= set(shown)


def test_points_above_another_devices_roof_stay_filled() -> None:
    figure = roofline(frame(row("sdpa-flash", 4096, 600)), [OWN, machine(A100)])
    assert not lines(figure, "hollow")


def test_a_device_without_any_ceiling_is_refused_even_beside_reference_cards() -> None:
    rows = frame(*sweep("sdpa-flash", device_id="some-new-card"))
    for machines in ([machine(A100)], [Machine("some-new-card", (), True), machine(A100)], []):
        with pytest.raises(UsageError, match=r"some-new-card.*flashbench ceilings.*--gpu"):
            roofline(rows, machines)


def test_a_device_that_the_catalogue_does_not_know_gets_its_measured_ceilings() -> None:
    own = Machine("some-new-card", (measured("hbm", 1000), measured("compute", 400, "bf16")), True)
    figure = roofline(frame(*sweep("sdpa-flash", device_id="some-new-card")), [own])
    assert not lines(figure, "peak some-new-card spec")
    assert "ridge 400" in texts(figure)


def test_the_legend_has_exactly_one_entry_per_provider() -> None:
    # RO-08
    figure = roofline(frame(*sweep("naive", 60), *sweep("sdpa-flash"), *sweep("sdpa-flash", dtype="fp16")), [OWN])
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["naive", "sdpa-flash"]
    assert all(axes.get_legend() is None for axes in figure.axes)


def test_rows_without_time_or_work_are_left_out_and_named_and_the_others_keep_their_labels() -> None:
    # RO-06
    rows = [
        row("naive", 512, 60),
        row("sdpa-math", 512) | {"time_ms": float("nan"), "tflops": float("nan")},
        row("sdpa-efficient", 512, 0.1) | {"tflops": 0.0, "intensity": 0.0},
        row("sdpa-flash", 512, 280),
    ]
    figure = roofline(frame(*rows), [OWN])
    assert [data(line) for line in lines(figure, "points naive")] == [[(rows[0]["intensity"], 60)]]
    assert [data(line) for line in lines(figure, "points sdpa-flash")] == [[(rows[3]["intensity"], 280)]]
    assert not lines(figure, "points sdpa-math")
    said = notes(frame(*rows), [OWN])
    for missing, reason in ((rows[1], "no time"), (rows[2], "no FLOP/s")):
        assert f"not drawn: {missing['key']} ({reason})" in said
        assert f"{missing['key']} ({reason})" in footer(figure)


@pytest.mark.parametrize("value", [None, 0.0, -1.0, float("nan"), float("inf")])
def test_no_value_that_a_logarithm_cannot_take_is_drawn(value: float | None) -> None:
    with pytest.raises(UsageError, match="nothing to draw"):
        roofline(frame(row("naive", 512) | {"intensity": value}), [OWN])


def test_a_failed_row_is_named_with_its_status_and_reason() -> None:
    failed = row("naive", 1024) | {"status": "oom", "reason": "predicted: needs 90 GiB"}
    said = notes(frame(row("naive", 512), failed), [OWN])
    assert said == [f"not drawn: {failed['key']} (oom: predicted: needs 90 GiB)"]


def test_a_dtype_without_a_peak_has_no_compute_roof_but_keeps_its_points_and_the_bandwidth() -> None:
    # RO-07
    rows = frame(*sweep("flash-v3", 200, dtype="fp8", device_id=A100))
    figure = roofline(rows, [machine(A100, True)])
    assert not lines(figure, "peak")
    assert lines(figure, f"bandwidth {A100}")
    assert lines(figure, "points flash-v3")
    assert f"no fp8 peak on {A100}" in texts(figure)
    assert f"no fp8 peak on {A100}" in notes(rows, [machine(A100, True)])


def test_rows_of_one_card_under_the_ceilings_of_another_are_told_and_those_above_named() -> None:
    # RO-04: measured on an H100, drawn with --gpu a100-pcie-80gb
    high, low = row("sdpa-cudnn", 4096, 324.5), row("naive", 4096, 100)
    said = notes(frame(high, low), [machine(A100, True)])
    assert f"the rows were measured on {H100}, but the ceilings are those of {A100}" in said
    (above,) = [line for line in said if line.startswith("above")]
    assert above == f"above the roof of {A100}: {high['key']} (324 TFLOP/s is above the spec bf16 peak of 312)"


def test_a_point_above_a_measured_ceiling_is_hollow_and_says_that_the_ceiling_wants_measuring_again() -> None:
    own = machine(H100, True, measured("compute", 500, "bf16"))
    figure = roofline(frame(*sweep("sdpa-cudnn", 490)), [own])
    filled, hollow = lines(figure, "points sdpa-cudnn"), lines(figure, "hollow points sdpa-cudnn")
    assert [y for line in filled for _, y in data(line)] == [490]
    assert [y for line in hollow for _, y in data(line)] == pytest.approx([514.5, 539])
    assert "Hollow (2 of 3)" in footer(figure)
    assert "measuring again" in footer(figure)


def test_bandwidth_above_the_data_sheet_is_called_cache_resident_and_kept() -> None:
    # BY-05: 16 MB in 3 us are 5.3 TB/s on a card of 1.9
    fast = row("naive", 512, 50.0, device_id=A100) | {
        "time_ms": 0.003,
        "hbm_bytes": 16e6,
        "intensity": 50e12 * 3e-6 / 16e6,
        "intensity_high": 50e12 * 3e-6 / 16e6,
    }
    own = machine(A100, True)
    assert len(lines(roofline(frame(fast), [own]), "hollow points naive")) == 1
    assert "5,333 GB/s is above the spec bandwidth of 1,935: cache resident" in notes(frame(fast), [own])[0]


def test_a_row_that_the_metrics_call_cache_resident_is_hollow() -> None:
    resident = row("naive", 512, 50.0) | {"remarks": ("cache resident: 8 MiB in an L2 of 50 MiB",)}
    figure = roofline(frame(resident, row("naive", 1024) | {"remarks": ()}), [OWN])
    assert [data(line)[0][1] for line in lines(figure, "hollow points naive")] == [50.0]
    (note,) = notes(frame(resident), [OWN])
    assert note.startswith("cache resident: 1 of 1 points")
    assert resident["key"] in note


def test_many_cache_resident_points_are_one_note_with_their_number() -> None:
    resident = [row("naive", n) | {"remarks": ("cache resident: fits",)} for n in range(512, 532)]
    (note,) = notes(frame(*resident, row("naive", 8192) | {"remarks": ()}), [OWN])
    assert note.startswith("cache resident: 20 of 21 points")
    assert note.endswith("and 17 more)")


@pytest.mark.parametrize(
    ("gpu", "mode", "head_dim", "tflops"),
    [
        (A100, "forward", 64, 624),
        (A100, "forward", 128, 1247),
        (H100, "forward", 128, 1979),
        (H100, "backward", 64, 2474),
    ],
)
def test_the_exponential_unit_bounds_work_by_the_head_dimension(
    gpu: str, mode: str, head_dim: int, tflops: int
) -> None:
    value = exp_roof(machine(gpu, True), (mode, head_dim, head_dim), "spec")
    assert value == pytest.approx(tflops, rel=1e-3)


def test_each_head_dimension_and_mask_has_a_panel_with_its_own_exponential_ceiling() -> None:
    rows = [
        r for d in (64, 128) for m in ("none", "causal") for r in sweep("sdpa-flash", head_dim=d, head_dim_v=d, mask=m)
    ]
    figure = roofline(frame(*rows), [OWN])
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == [f"forward, head dim {d}, {m}" for d in (64, 128) for m in ("dense", "causal")]
    heights = [data(lines(figure, "exp", panel)[0])[0][1] for panel in range(4)]
    assert heights == pytest.approx([989.4, 989.4, 1978.9, 1978.9], rel=1e-3)
    assert len({axes.get_xlim() for axes in figure.axes}) == 1


def test_small_values_are_shown_in_gflops() -> None:
    cpu = Machine("cpu", (measured("hbm", 20), measured("compute", 0.1, "fp32")), True)
    rows = [row("naive", n, 0.03, dtype="fp32", device_id="cpu") for n in (128, 256)]
    figure = roofline(frame(*rows), [cpu, machine(A100)])
    assert "GFLOP/s" in figure.axes[0].get_ylabel()
    assert [y for _, y in data(lines(figure, "points naive")[0])] == pytest.approx([30, 30])
    assert data(lines(figure, "peak cpu measured")[0])[0][1] == pytest.approx(100)
    assert f"Off the scale: {A100}" in footer(figure)


def two_devices() -> list[dict[str, Any]]:
    return [*sweep("naive"), *sweep("naive", 100.0, device_id=A100)]


def test_a_second_device_is_a_line_of_its_own_named_after_it_beside_its_own_ceilings() -> None:
    figure = roofline(frame(*two_devices()), [OWN, machine(A100, True)])
    here, there = (
        [line for line in lines(figure, "line") if line.get_gid() == f"line {n}"] for n in ("naive", "naive @ a100")
    )
    assert [y for _, y in data(there[0])] == pytest.approx([100, 105, 110])
    assert [y for _, y in data(here[0])] == pytest.approx([300, 315, 330])
    assert here[0].get_color() == there[0].get_color()
    assert "device of the @ lines" in texts(figure)
    assert "not this device" not in texts(figure)
    assert f"on {H100} and {A100}" in " ".join(texts(figure))


def test_points_of_a_second_device_are_held_to_that_devices_roof() -> None:
    rows = [row("naive", 4096, 600), row("naive", 4096, 600, device_id=A100)]
    figure = roofline(frame(*rows), [OWN, machine(A100, True)])
    assert lines(figure, "hollow points naive @ a100")
    assert not lines(figure, "hollow points naive")[1:]
    (note,) = notes(frame(*rows), [OWN, machine(A100, True)])
    assert note.startswith(f"above the roof of {A100}")


def test_a_second_device_without_ceilings_is_refused() -> None:
    with pytest.raises(UsageError, match=rf"2 devices.*{A100}"):
        roofline(frame(*two_devices()), [OWN])


def test_with_the_l2_every_point_stands_again_at_the_same_height_over_the_bytes_of_the_l2() -> None:
    own = Machine(H100, (*OWN.ceilings, Ceiling("l2", None, "read", 5600.0, "GB/s", "measured", "isolated")), True)
    rows = sweep("sdpa-flash")
    figure = roofline(frame(*rows), [own], levels=("hbm", "l2"))
    (again,) = lines(figure, "l2 points sdpa-flash")
    assert data(again) == [(r["intensity_low"], r["tflops"]) for r in rows]
    (slope,) = lines(figure, f"l2 bandwidth {H100} measured")
    (x, y), (end, top) = data(slope)
    assert (y / x, top / end) == (pytest.approx(5.6), pytest.approx(5.6))
    assert any("L2 5,600 GB/s measured" in text for text in texts(figure))
    assert not lines(roofline(frame(*rows), [own]), "l2")


@pytest.mark.parametrize(
    ("levels", "words"),
    [(("hbm", "l2"), "flashbench ceilings"), (("hbm", "l3"), "known: hbm, l2"), (("l2",), "hbm,l2")],
)
def test_a_level_that_cannot_be_drawn_is_refused(levels: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        roofline(frame(*sweep("sdpa-flash")), [machine(H100, True)], levels=levels)


def test_what_the_metrics_say_of_a_point_is_what_explain_prints() -> None:
    said = row("naive", 4096) | {"explanation": "the launch takes 71% of the time"}
    assert explain(frame(said), [OWN])[0].endswith("FLOP/byte, the launch takes 71% of the time")


def test_the_footer_names_device_variant_conditions_and_conventions() -> None:
    own = Machine(H100, (*OWN.ceilings, measured("hbm", 2900)), True, "SXM5, power limit 700 W")
    said = footer(roofline(frame(*sweep("sdpa-flash")), [own, machine(A100)]))
    for words in (H100, "SXM5, power limit 700 W", "cold L2, isolated", "causal", "modelled", "not this device"):
        assert words in said


def test_a_filter_that_leaves_nothing_names_what_is_there() -> None:
    rows = frame(*sweep("sdpa-flash"), *sweep("naive", dtype="fp16"))
    assert set(narrow(rows, dtype=["fp16"]).provider) == {"naive"}
    with pytest.raises(UsageError, match=r"no row has dtype fp8; the rows have bf16, fp16"):
        narrow(rows, dtype=["fp8"])


def test_each_point_is_explained_by_the_ceiling_that_holds_it() -> None:
    slow = row("naive", 4096, 100) | {"hbm_bytes": 3e9 * row("naive", 4096, 100)["time_ms"]}
    fast = row("sdpa-cudnn", 4096, 700)
    first, second = explain(frame(slow, fast), [OWN])
    assert first.startswith(f"{slow['key']}: 100 TFLOP/s at ")
    assert "held by HBM" in first
    assert "held by tensor-core" in second


def test_no_bandwidth_label_runs_out_of_a_flat_panel() -> None:
    rows = [
        row("sdpa-cudnn", n, head_dim=d, head_dim_v=d, mask=mask, mode="backward", tflops=t)
        for d in (64, 128)
        for mask in ("none", "causal")
        for n, t in ((4096, 260.0), (16384, 480.0))
    ]
    figure = roofline(frame(*rows), [machine("h200-sxm-141gb", True), machine(H100, False), machine(A100, False)])
    renderer = figure.canvas.get_renderer()
    for axes in figure.axes:
        for text in axes.texts:
            if text.get_gid() == "bandwidth label":
                inside, frame_box = text.get_window_extent(renderer), axes.get_window_extent(renderer)
                assert inside.y1 <= frame_box.y1
                assert inside.x1 <= frame_box.x1


@pytest.mark.parametrize("head_dims", [(128, 128), (192, 128)])
@pytest.mark.parametrize("label", [None, "a-data-center-gpu-with-a-rather-long-name"])
def test_no_label_beside_a_panel_runs_off_the_page(head_dims: tuple[int, int], label: str | None) -> None:
    d, d_v = head_dims
    name = label or H100
    rows = sweep("flash-v3", 600, head_dim=d, head_dim_v=d_v, mode="forward_backward", device_id=name)
    own = Machine(name, OWN.ceilings, True)
    figure = roofline(frame(*rows), [own, machine(A100)])
    renderer, page = figure.canvas.get_renderer(), figure.bbox
    labels = [text for axes in figure.axes for text in axes.texts if text.get_gid() == "ceiling label"]
    assert any("forward + backward" in text.get_text() for text in labels)
    for text in labels:
        assert text.get_window_extent(renderer).x1 <= page.x1, text.get_text()
