"""Cost profiles: what is not measured is an error that names it."""

import pytest
from tests.profiles import make_profile

from perdure.model.errors import ConfigError, MeasureError
from perdure.model.planning.costs import AllReduce, CostProfile, read_profile, write_profile


def test_a_file_is_read_as_it_was_written() -> None:
    profile = make_profile([1.0, 2.0], (1, 4), state=100, stored=10, weight=1.0)
    again = read_profile(write_profile(profile), "p.json")
    assert again == profile
    assert again.fingerprint == profile.fingerprint
    assert again.micro_batches == (1, 4)


def test_any_figure_changes_the_fingerprint() -> None:
    prints = {make_profile([1.0, s]).fingerprint for s in (1.0, 1.0000001, 2.0)}
    assert len(prints) == 3


def test_links_that_were_not_measured_are_named() -> None:
    profile = make_profile([1.0], links=False)
    with pytest.raises(MeasureError, match="no transfer across nodes"):
        profile.estimate_transfer("cluster")
    with pytest.raises(MeasureError, match="no all-reduce over 3 devices within a node"):
        profile.estimate_all_reduce("node", 3)


def test_groups_smaller_than_the_smallest_measured_are_not_guessed() -> None:
    profile = CostProfile(
        "m", "x", 0, make_profile([1.0]).blocks, (), (AllReduce("cluster", 4, 1e-3, 1e9),)
    )
    with pytest.raises(MeasureError, match="over 2 devices across nodes"):
        profile.estimate_all_reduce("cluster", 2)


def test_between_two_sizes_the_cost_lies_between_theirs() -> None:
    cost = make_profile([1.0]).estimate_all_reduce("cluster", 5)
    assert cost.latency_s == pytest.approx((2e-4 + 14e-4) / 2)
    assert 1 / cost.bytes_per_s == pytest.approx((1 / 10e9 + 1 / 5.7e9) / 2)


def test_beyond_the_largest_a_ring_is_assumed_and_said() -> None:
    """A ring of n: 2(n-1) messages; 2(n-1)/n of the bytes over each link."""
    message_s, link = 1e-4, 10e9

    def ring(n: int) -> AllReduce:
        return AllReduce("cluster", n, 2 * (n - 1) * message_s, link * n / (2 * (n - 1)))

    profile = CostProfile("m", "x", 0, make_profile([1.0]).blocks, (), (ring(4),))
    far, wanted = profile.estimate_all_reduce("cluster", 64), ring(64)
    assert far.latency_s == pytest.approx(wanted.latency_s)
    assert far.bytes_per_s == pytest.approx(wanted.bytes_per_s)
    assert profile.is_extrapolated("cluster", 64)
    assert not profile.is_extrapolated("cluster", 4)


SHARED = (
    '{"blocks": [%s], "parameter_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": 0, '
    '"update_s": 0.0}'
)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"perdure_profile": 1', '"perdure_profile": 2', "p.json:2:21: expected version 1"),
        ('"forward_s": 2.0', '"forward_s": 0.0', r"expected `float` > 0"),
        ('"forward_s": 2.0,\n', "", "missing required field `forward_s`"),
        ('"name": "b1"', '"name": "b0"', "expected each name once, got b0"),
        ('"4": {', '"8": {', r"b0 measured with the micro-batches of all|b1 measured with"),
        ('"weight_s": 2.0', '"weight_s": 5.0', "expected a part of backward_s, 4 s"),
        ('"machine"', '"engine"', "unknown field `engine`"),
        ('"shared": []', f'"shared": [{SHARED % "1, 0"}]', "expected places of two blocks or more"),
        ('"shared": []', f'"shared": [{SHARED % "0, 2"}]', "expected places of two blocks or more"),
        ('"shared": []', f'"shared": [{SHARED % "0, 1"}]', "expected what each block has, 0"),
    ],
)
def test_what_is_malformed_is_said_with_its_place(old: str, new: str, said: str) -> None:
    text = write_profile(make_profile([1.0, 2.0], (1, 4), weight=1.0))
    assert old in text
    with pytest.raises(ConfigError, match=said) as caught:
        read_profile(text.replace(old, new, 1), "p.json")
    assert caught.value.message.startswith("p.json:")
