"""Lines and staircases of plots."""

import math
import re
from itertools import pairwise

import pytest

from perdure.dash.svg import STEPS_MAX, compute_means, make_stairs, render_lines


def test_means_of_a_staircase() -> None:
    rows = [(0.0, 4.0), (5.0, 0.0), (6.0, 8.0)]
    assert compute_means(rows, 10.0, 2) == pytest.approx([4.0, (0 + 4 * 8) / 5])
    assert sum(compute_means(rows, 10.0, 7)) * 10 / 7 == pytest.approx(4 * 5 + 8 * 4)


def test_a_short_staircase_keeps_its_corners_and_a_long_one_its_area() -> None:
    assert make_stairs([(0.0, 1.0), (3600.0, 2.0)], 7200.0) == [(0, 1), (1, 1), (1, 2), (2, 2)]
    long = [(float(second), float(second % 2)) for second in range(5000)]
    corners = make_stairs(long, 5000.0, unit_s=1.0)
    assert len(corners) == 2 * STEPS_MAX
    area = sum(y * (x1 - x0) for (x0, y), (x1, _) in zip(corners[::2], corners[1::2], strict=True))
    assert area == pytest.approx(2500.0)


def test_every_line_is_within_the_plot_and_named() -> None:
    lines = [("a", [(0.1, 0.5), (10.0, 0.9)]), ("b", [(0.1, 1.0), (10.0, 0.6)])]
    svg = render_lines(lines, x_label="x", y_label="y", x_log=True, y_low=0.4)
    points = [
        tuple(map(float, point.split(",")))
        for path in re.findall(r'points="([^"]*)"', svg)
        for point in path.split()
    ]
    assert len(points) == 4
    assert all(0 <= x <= 960 and 0 <= y <= 300 for x, y in points)
    assert "<title>a</title>" in svg
    assert "<title>b</title>" in svg


def test_names_in_the_legend_cover_no_other() -> None:
    names = ["restart-hang", "U1", "x" * 300, *(f"policy {n}" for n in range(9))]
    svg = render_lines([(n, [(0.0, 1.0), (1.0, 2.0)]) for n in names], x_label="x", y_label="y")
    words = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="start">([^<]+)<', svg)[:-1]
    assert [word for *_, word in words[:2]] == names[:2]
    assert len(words) == len(names)
    places = sorted((float(y), float(x), len(word)) for x, y, word in words)
    for (y, x, size), (next_y, next_x, _) in pairwise(places):
        assert next_y - y >= 17 or (next_y == y and next_x - x >= 9 * size), "16.5px on a phone"
    assert all(x + 9 * size <= 960 for _, x, size in places)
    top = min(float(y) for y in re.findall(r'points="[\d.]+,([\d.]+)', svg))
    assert top > places[-1][0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308, -1e308])
def test_what_cannot_be_drawn_is_left_out_or_cut(value: float) -> None:
    lines = [("a", [(0.0, 1.0), (1.0, value), (value, 2.0)]), ("b", [(0.0, value)])]
    svg = render_lines(lines, x_label="x", y_label="y")
    assert "polyline" in svg
    assert not re.search(r'"[^"]*\b(nan|inf)\b[^"]*"', svg)


def test_values_below_the_axis_are_within_the_plot() -> None:
    svg = render_lines([("a", [(0.0, -5.0), (1.0, -5.0)])], x_label="x", y_label="y")
    (path,) = re.findall(r'points="([^"]*)"', svg)
    assert all(0.0 <= float(point.split(",")[1]) <= 300.0 for point in path.split())
