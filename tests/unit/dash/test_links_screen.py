import xml.etree.ElementTree as ET

from perdure.dash.links import render_heat_map, render_links
from perdure.model.events import LinksNoted
from perdure.model.signals.links import LinkSample
from perdure.telemetry.links import DelayMatrix, make_delay_matrix


def ring(size: int, slow: tuple[int, int] = (-1, -1), backoff: int = 0) -> DelayMatrix:
    links = []
    for src in range(size):
        dst = (src + 1) % size
        bad = (src, dst) == slow
        links.append(
            LinkSample(
                src, dst, "dp", 50_000_000, 1.5 if bad else 0.1, 0.0002, 0, 0,
                backoff if bad else 0, 2.0 if bad else 0.0,
            )
        )  # fmt: skip
    return make_delay_matrix(LinksNoted(generation=1, at_s=9.0, window_s=60.0, links=tuple(links)))


def test_a_slow_link_stands_out_in_the_table() -> None:
    text = render_links(ring(4, slow=(1, 2)))
    (row,) = [line for line in text.splitlines() if line.startswith("     1 ")]
    assert row.split() == ["1", ".", "-", "30.00*", "."]
    assert text.count("*") == 2  # The cell, and the line that explains the mark.
    worst = text.split("backoff\n")[1].splitlines()[0]
    assert worst.split() == ["1->2", "dp", "50.0", "30.00", "15.0", "0.20", "0", "0", "0"]


def test_of_a_link_that_nccl_counts_nothing_is_shown_that_only_the_kernel_knows() -> None:
    link = LinkSample(0, 1, "dp", 50_000_000, 0.1, 0.0, 0, 0, 0, 0.0, source="nccl")
    matrix = make_delay_matrix(LinksNoted(generation=1, at_s=9.0, window_s=60.0, links=(link,)))
    assert render_links(matrix).splitlines()[-1].endswith("2.00      1.0  counted by NCCL")
    html = render_heat_map(matrix)
    assert "50.0 MB, counted by NCCL" in html
    assert "rtt" not in html


def test_links_are_compared_with_those_of_their_own_network() -> None:
    links = [LinkSample(0, n, "dp", 50_000_000, 0.002, 0.0, 0, 0, 0, 0.0, source="nccl")
             for n in range(1, 6)]  # fmt: skip
    links += [LinkSample(0, n, "cpu", 50_000_000, 0.05, 2e-4, 0, 0, 0, 0.0) for n in (6, 7)]
    matrix = make_delay_matrix(LinksNoted(generation=1, at_s=9.0, window_s=60.0, links=(*links,)))
    text = render_links(matrix)
    assert "median 1.00, of NCCL's 0.04)" in text
    assert text.count("*") == 1  # The line that explains the mark.


def test_a_large_world_is_listed_worst_first() -> None:
    lines = render_links(ring(200, slow=(150, 151))).splitlines()
    assert lines[3].split()[0] == "150->151"
    assert len(lines) < 30


def test_an_empty_matrix_says_why() -> None:
    empty = DelayMatrix(note="no <TCP> connections")
    assert render_links(empty) == "Delay matrix: empty; no <TCP> connections"
    assert render_heat_map(empty) == '<p class="soft">Empty: no &lt;TCP&gt; connections.</p>'


def test_the_heat_map_is_one_cell_a_link_and_the_slow_one_is_dark() -> None:
    html = render_heat_map(ring(4, slow=(1, 2)))
    root = ET.fromstring(f"<div>{html}</div>")
    cells = {title.text or "": rect for rect in root.iter("rect") for title in rect}
    assert len(cells) == 4
    dark = [title for title, rect in cells.items() if rect.get("fill") == "#8c1c3a"]
    assert len(dark) == 1
    assert dark[0].startswith("rank 1 to rank 2, 30.00 ms/MB (15.0x)")


def test_an_unanswered_link_is_drawn_and_described_even_without_bytes() -> None:
    html = render_heat_map(ring(4, slow=(2, 3), backoff=4))
    assert "unanswered for 2.0 s (backoff 4)" in html


def test_a_large_heat_map_keeps_what_is_slow() -> None:
    html = render_heat_map(ring(500, slow=(321, 322)))
    assert "rank 321 to rank 322" in html
    assert html.count("<rect") <= 64
    assert "436 ranks with nothing slow are left out" in html


def test_loss_is_unusual_from_a_few_dozen_segments_on() -> None:
    def row(retrans: int) -> str:
        links = tuple(
            LinkSample(a, 1 - a, "dp", 5_000_000, 0.01, 0.0002, retrans if a else 0, 0, 0, 0.0)
            for a in range(2)
        )
        noted = LinksNoted(generation=0, at_s=0.0, window_s=60.0, links=links)
        return render_links(make_delay_matrix(noted)).splitlines()[4]

    assert "*" not in row(15)
    assert "*" in row(30)
