"""What the README shows is what the commands print; and the comparison finds what is not so."""

from pathlib import Path

import pytest

from tests.documents.shown import PAGES, ROOT, agrees, mask_line, read_page, run_page


def test_what_differs_from_run_to_run_is_masked() -> None:
    one = "demo: done after 204.4 s on 2 ranks, 1179 steps of 114 ms; 48.3%  ██▄ /home/me/x pid 12"
    two = "demo: done after 7 s on 2 ranks, 80 steps of 9 ms; 3%  █ /tmp/y/z pid 31245"
    assert mask_line(one) == mask_line(two)
    assert mask_line("detect 0.01  decide 1.21") == mask_line("detect 12.20 decide 0.00")
    assert mask_line("for 1m22s, 12m, 2 min ago") == mask_line("for 59s, 1h, 13 s ago")


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("rank 1: signal 9 (SIGKILL)", "rank 0: signal 9 (SIGKILL)"),
        ("on 2 ranks", "on 4 ranks"),
        ("exit code 0", "exit code 1"),
        ("lr=0.01 on 2 ranks", "lr=0.05 on 2 ranks"),
        ("1 restart", "2 restarts"),
        ("a line", "a line\nand another"),
        ("a line\nand another", "a line"),
        ("begin\n...\nend", "begin\nend of it"),
        ("begin ... end", "begin of it"),
        ("", "something"),
    ],
)
def test_what_is_not_so_is_found(shown: str, printed: str) -> None:
    assert agrees(shown.splitlines(), shown.splitlines())
    assert not agrees(shown.splitlines(), printed.splitlines())


def test_dots_stand_for_lines_and_for_words() -> None:
    assert agrees(["begin", "...", "end"], ["begin", "1", "2", "end", ""])
    assert agrees(["begin ... end"], ["begin of the very end"])


def test_a_figure_that_is_always_the_same_is_compared_to_the_digit() -> None:
    assert agrees(["step  3.1451 s"], ["step 2.9 s"])
    assert not agrees(["step  3.1451 s"], ["step 3.1452 s"], exactly=True)
    assert agrees(["step  3.1451 s"], ["step 3.1451 s"], exactly=True)


def test_a_page_is_run_in_its_order_and_a_false_line_is_named(tmp_path: Path) -> None:
    page = ROOT / "build" / f"{tmp_path.name}.md"
    page.parent.mkdir(exist_ok=True)
    page.write_text(
        "# A page\n<!-- docs: file a/x.txt -->\n```\nhello\n```\n"
        "<!-- docs: until test -e a/x.txt -->\n"
        "```console\n$ cat a/x.txt; false\nhello\n$ echo $?\n1\n$ echo rank 1\nrank 2\n```\n"
        "<!-- docs: not run: it would end the world -->\n```console\n$ false\n```\n"
    )
    try:
        steps = read_page(page)
        assert [step.kind for step in steps] == ["file", "until", "run", "run", "run", "shown"]
        wrong = run_page(page, steps)
    finally:
        page.unlink()
    assert len(wrong) == 1
    assert ":12: $ echo rank 1" in wrong[0]


@pytest.mark.parametrize("text", ["<!-- docs: fille x -->\n", "```console\n$ true\n"])
def test_a_page_that_cannot_be_read_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(ValueError, match=r"page\.md"):
        read_page(tmp_path / "page.md")


def test_every_shown_command_is_run_or_says_why_not() -> None:
    never = [
        f"{path.name}:{step.line}"
        for path in PAGES
        for step in read_page(path)
        if step.kind == "shown" and step.text.startswith("of a page")
    ]
    assert never == []


def test_the_readme_shows_what_is_printed() -> None:
    path = ROOT / "README.md"
    assert run_page(path, read_page(path)) == []
