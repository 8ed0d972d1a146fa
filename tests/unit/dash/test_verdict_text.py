"""The wait-for graph in words."""

from perdure.dash.verdicts import render_evidence, render_waits


def test_waiters_of_one_rank_and_collective_are_one_line():
    edges = [[0, 1, "dp", "allreduce", 7], [2, 1, "dp", "allreduce", 7], [3, 0, "tp", "send", 2]]
    assert render_waits(edges) == [
        "ranks 0,2 wait for rank 1 in allreduce #7 of dp",
        "rank 3 waits for rank 0 in send #2 of tp",
    ]


def test_a_long_graph_says_what_it_leaves_out():
    lines = render_waits([[rank, rank + 1, "pp", "recv", 1] for rank in range(40)])
    assert len(lines) == 13
    assert lines[-1] == "and 28 more"


def test_waits_are_named_as_evidence():
    lines = render_evidence("waits", [[0, 1, "0", "allreduce", 7]])
    assert [line.strip() for line in lines] == [
        "who waits for whom:",
        "rank 0 waits for rank 1 in allreduce #7 of 0",
    ]
