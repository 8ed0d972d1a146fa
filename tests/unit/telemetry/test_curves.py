"""Curves that take a bounded room: what is lost with age, and what never is."""

import math
import random

import pytest

from perdure.model.errors import ProtocolError
from perdure.telemetry import curves as module
from perdure.telemetry.curves import (
    Bucket,
    Curve,
    Curves,
    decode_curves,
    encode_curves,
)


def log(curves: Curves, steps: range, name: str = "loss", source: str = "g0-r0-p1") -> None:
    for step in steps:
        curves.take(1000.0 + step, source, ((step, {name: float(step)}),), 0)


def test_the_newest_are_kept_singly_and_older_ones_coarser() -> None:
    curve = Curve()
    for step in range(100_000):
        curve.add(step, float(step), float(step), 64)
    buckets = list(curve)
    assert len(buckets) < 64 * 12
    assert buckets[-1] == Bucket(99_999, 99_999, 99_999, 1, 99_999, 99_999, 99_999, 99_999)
    assert sum(bucket.values for bucket in buckets) == 100_000
    assert [b.first_step for b in buckets[1:]] == [b.step + 1 for b in buckets[:-1]]
    for bucket in buckets:
        assert (bucket.low, bucket.high, bucket.last) == (*bucket[:2], bucket.step)
        assert bucket.mean == pytest.approx((bucket.low + bucket.high) / 2)
        assert bucket.values <= 1 + 8 * (100_000 - bucket.step) / 64, bucket


def test_whatever_the_order_nothing_is_counted_twice_or_without_end() -> None:
    """Groups that log the same step, restarts, and a rank that counts backwards."""
    curve, chance = Curve(), random.Random(7)
    for step in range(3000):
        curve.add(step - chance.randrange(40), 0.0, 1.0, 64)
    for step in range(3000, -3000, -1):
        curve.add(step, 0.0, 1.0, 64)
    assert len(curve) < 64 * 12
    steps = [bucket.first_step for bucket in curve]
    assert steps == sorted(steps)


def test_a_step_logged_again_takes_the_place_of_the_older() -> None:
    curves = Curves()
    log(curves, range(150))
    for step in range(101, 120):
        curves.take(2000.0, "g1-r0-p9", ((step, {"loss": -1.0}),), 0)
    rows = {int(b.step): b.last for b in curves.curves["loss"]}
    assert len(rows) == 150
    assert {rows[step] for step in range(101, 120)} == {-1.0}
    assert (rows[100], rows[120]) == (100.0, 120.0)


def test_what_is_not_finite_shows_in_a_mean_and_not_in_a_minimum() -> None:
    curve = Curve()
    for step in range(64):
        curve.add(step, 0.0, math.nan if step == 5 else math.inf if step == 9 else 1.0, 8)
    buckets = list(curve)
    (diverged,) = [b for b in buckets if math.isnan(b.mean)]
    assert diverged.first_step <= 5 <= diverged.step
    assert diverged.low == 1.0
    assert max(b.high for b in buckets) == math.inf


def test_all_curves_together_are_bounded_and_names_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUCKETS_MAX", 2000)
    monkeypatch.setattr(module, "NAMES_MAX", 20)
    monkeypatch.setattr(module, "_CHECK_EVERY", 100)
    curves = Curves()
    for step in range(2000):
        curves.take(0.0, "a", ((step, {f"m{n}": 1.0 for n in range(25)}),), 1)
    assert sum(map(len, curves.curves.values())) <= 2000 + 100
    assert len(curves.curves) == 20
    assert curves.dropped["a"].count == 2000 * 6
    assert {sum(b.values for b in curve) for curve in curves.curves.values()} == {2000}


def test_they_are_read_as_they_were_written() -> None:
    curves = Curves()
    log(curves, range(9000))
    log(curves, range(10), 'lo"ss\nß')
    curves.count_dropped(5.0, "a", 3)
    data = encode_curves(curves)
    back = decode_curves(data)
    assert {n: list(c) for n, c in back.curves.items()} == {
        n: list(c) for n, c in curves.curves.items()
    }
    assert back.dropped == curves.dropped
    for bad in (b"", data[:-1], data + b"x", b"{}\n", data.replace(b'"version":1', b'"version":9')):
        with pytest.raises(ProtocolError):
            decode_curves(bad)
