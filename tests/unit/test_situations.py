"""What `make exact` and `make agreed` count."""

from tests.situations import count


def test_situations_are_counted_by_how_they_ended() -> None:
    found = count(
        [
            "passed tests/a.py::test_kills_change_no_bit[2-ddp]",
            "passed tests/a.py::test_what_no_checkpoint_keeps_is_named[queue]",
            "failed tests/a.py::test_members_agree[clip]",
            "failed tests/a.py::test_members_agree[clip]",
            "skipped tests/a.py::test_members_agree[heat]",
        ]
    )
    assert found == {"equal": 1, "named": 1, "wrong": 1, "skipped": 1}
