"""A bar of progress, where there is no terminal to draw it on."""

import pytest

from perdure.cli.speech.bar import Bar


@pytest.mark.parametrize(
    ("name", "told"), [("replay", "perdure: replay: measure 2 nodes\n"), ("", "")]
)
def test_without_a_terminal_a_bar_is_a_line_for_each_part_or_nothing(
    name: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Bar(name) as bar:
        bar.say("measure", 0.5, "2 nodes")
        bar.say("measure", 1.0, "1 nodes")
    out = capsys.readouterr()
    assert (out.out, out.err) == ("", told)
