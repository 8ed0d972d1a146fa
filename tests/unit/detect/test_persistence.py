"""When an excess set in."""

from perdure.detect.persistence import Persistence


def test_onset_is_where_the_samples_turn_odd_for_good() -> None:
    suspect = Persistence(0.0, 0.4, 0.1)
    suspect.add(0.0, 0.5)  # One odd sample, long before.
    for tick in range(1, 41):
        suspect.add(tick * 0.1, 0.0 if tick % 9 else 0.5)
    for tick in range(41, 71):
        suspect.add(tick * 0.1, 0.5 if tick % 7 else 0.0)
    assert 4.0 <= suspect.onset_s() <= 4.3
