"""Labels that never cover one another, in the placer and in a full picture."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metric_rows import A100, H100, frame, machine, row

from flashbench.report.labels import LABEL_GID, Box, Wanted, place, stack
from flashbench.report.roofline import roofline

PAGE = Box(0, 0, 400, 300)
SPOTS = st.lists(st.tuples(st.floats(0, 400), st.floats(0, 300)), max_size=40)


@settings(max_examples=50, deadline=None)
@given(SPOTS)
def test_placed_labels_lie_inside_and_never_overlap(spots: list[tuple[float, float]]) -> None:
    found = [box for box in place([Wanted(x, y, 30, 10) for x, y in spots], PAGE) if box is not None]
    assert all(box.inside(PAGE) for box in found)
    assert not any(a.overlaps(b) for a, b in itertools.combinations(found, 2))


@settings(max_examples=20, deadline=None)
@given(SPOTS)
def test_placing_is_the_same_every_time(spots: list[tuple[float, float]]) -> None:
    wanted = [Wanted(x, y, 30, 10) for x, y in spots]
    assert place(wanted, PAGE) == place(wanted, PAGE)


def test_a_label_avoids_obstacles_while_it_can() -> None:
    wanted = [Wanted(200, 150, 30, 10)]
    (free,) = place(wanted, PAGE)
    assert free is not None
    (moved,) = place(wanted, PAGE, obstacles=[free])
    assert moved is not None
    assert not moved.overlaps(free)


def test_a_label_covers_obstacles_rather_than_vanish_but_never_another_label() -> None:
    wanted = [Wanted(200, 150, 30, 10)]
    assert place(wanted, PAGE, obstacles=[PAGE]) != [None]
    assert place(wanted, PAGE, labels=[PAGE]) == [None]


def test_a_label_stands_on_the_preferred_side_when_that_is_free() -> None:
    (right,) = place([Wanted(200, 150, 30, 10, prefer=(1, 0))], PAGE)
    (below,) = place([Wanted(200, 150, 30, 10, prefer=(0, -1))], PAGE)
    assert right is not None
    assert right.left > 200
    assert below is not None
    assert below.top < 150


@given(st.lists(st.floats(0, 100), min_size=1, max_size=12))
def test_stacked_heights_keep_their_order_their_distance_and_their_bounds(heights: list[float]) -> None:
    gap = 5.0
    found = stack(heights, gap, 0, 100)
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    spaced = [found[i] for i in order]
    assert all(b - a >= gap - 1e-6 for a, b in itertools.pairwise(spaced))
    assert min(spaced) >= -1e-6
    assert max(spaced) <= 100 + 1e-6


def test_heights_that_are_apart_stay_where_they_are() -> None:
    assert stack([10, 90, 50], 5, 0, 100) == pytest.approx([10, 90, 50])


def test_heights_that_do_not_fit_share_the_room() -> None:
    assert stack([50] * 5, 40, 0, 100) == pytest.approx([0, 25, 50, 75, 100])


def test_sixty_points_are_drawn_without_one_label_over_another() -> None:
    providers = {"naive": 60, "sdpa-math": 35, "sdpa-efficient": 180, "sdpa-flash": 310, "flash-v3": 560}
    rows = [
        row(provider, n, tflops * (0.8 + i / 25) * scale, dtype=dtype)
        | ({"intensity": 55.0 + i} if tflops < 100 else {})
        for provider, tflops in providers.items()
        for dtype, scale in (("bf16", 1.0), ("fp16", 0.97))
        for i, n in enumerate((512, 1024, 2048, 4096, 8192, 16384))
    ]
    assert len(rows) == 60
    figure = roofline(frame(*rows), [machine(H100, True), machine(A100)])
    (axes,) = figure.axes
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    labels = [text for text in axes.texts if text.get_gid() in (LABEL_GID, "ridge number", "ceiling label")]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in labels]
    clashes = [(a, b) for (a, one), (b, two) in itertools.combinations(boxes, 2) if one.overlaps(two)]
    assert clashes == []
    written = {text for text, _ in boxes}
    assert {*providers, "N = 512", "16k"} <= written


def test_no_label_stands_above_the_roof_when_all_points_are_under_it() -> None:
    near_the_roof = [
        row("naive", n, 90 + i, head_dim=64, head_dim_v=64) | {"intensity": 29.0 + i} for i, n in enumerate((512, 8192))
    ]
    figure = roofline(
        frame(*near_the_roof, row("sdpa-flash", 4096, 300, head_dim=64, head_dim_v=64)), [machine(H100, True)]
    )
    (axes,) = figure.axes
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    for text in axes.texts:
        if text.get_gid() == LABEL_GID:
            box = text.get_window_extent(renderer)
            intensity, tflops = axes.transData.inverted().transform(((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2))
            assert tflops < intensity * 3.35, text.get_text()
