"""Whether a loop only shows a value."""

import ast
import textwrap

import pytest

from perdure.worker.carried import is_only_shown


@pytest.mark.parametrize(
    ("head", "shown"),
    [("for step in steps:", True), ("while left:", True), ("while len(losses) < 9:", False)],
)
def test_what_decides_when_a_loop_ends_is_not_only_shown(head: str, shown: bool) -> None:
    body = "loss = train()\nlosses.append(loss.item())\nprint(losses[-1])\n"
    (loop,) = ast.parse(f"{head}\n{textwrap.indent(body, '    ')}").body
    assert isinstance(loop, ast.For | ast.While)
    assert is_only_shown(loop, "losses") == shown
