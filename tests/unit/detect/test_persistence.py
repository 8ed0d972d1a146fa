"""When an excess set in."""

from perdure.detect.slowness.persistence import Persistence


def test_onset_is_where_the_samples_turn_odd_for_good() -> None:
    suspect = Persistence(0.0, 0.1)
    suspect.add(0.0, 0.5)  # One odd sample, long before.
    for tick in range(1, 41):
        suspect.add(tick * 0.1, 0.0 if tick % 9 else 0.5)
    for tick in range(41, 71):
        suspect.add(tick * 0.1, 0.5 if tick % 7 else 0.0)
    assert 4.0 <= suspect.onset_s() <= 4.3


def test_an_odd_sample_now_and_then_does_not_keep_it_open():
    watch = Persistence(0.0, 0.15)
    for i in range(100):
        watch.add(i / 10, 0.5 if i < 40 or i % 8 == 0 else 0.0)
    assert not watch.is_over(5.0, 5.0)
    assert watch.is_over(9.9, 5.0)


def test_a_burst_and_a_pause_after_it_are_two_events():
    """Of five samples, one usual one between them says that nothing has lasted."""
    excesses = (0.608, 0.588, 0.509, 0.054, 1.255)
    for begun_s in (0.0, 0.4):
        suspect = Persistence(0.0, 0.15, 0.4)
        for i, excess in enumerate(excesses):
            suspect.add(begun_s + 0.4 * i, excess)
        assert suspect.confirm(2.0) == 0.0


def test_one_usual_sample_of_many_excuses_nobody():
    suspect = Persistence(0.0, 0.15, 0.2)
    for i in range(11):
        suspect.add(0.2 * i, 0.05 if i == 5 else 0.6)
    assert suspect.confirm(2.0) > 0.5
