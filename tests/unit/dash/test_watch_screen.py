"""`perdure watch --once` at several widths, and what it says first."""

import msgspec
import pytest

from perdure.cli.looking.look import render_snapshot
from perdure.dash.shape import render_span
from perdure.dash.watch import choose_shown_verdicts, render_busy, render_ranks, render_watch
from perdure.model.report import DeviceRow, IncidentRow, RankRow, Snapshot
from perdure.model.signals.progress import BusyPhase
from perdure.model.steering import Change, KeySpec
from perdure.model.verdicts import Culprit, Verdict


def rank(number, state="running", step=120, collective="allreduce #7"):
    return RankRow(number, number // 8, 1, state, "step", step, 8.0, collective, 1.0, 1)


def picture(count, **more):
    snapshot = Snapshot(
        1, "j", "running", 100.0, 40.0, 1, 1, 120, 8.0, count, "resumable", "go on",
        ranks=tuple(rank(i) for i in range(count)),
    )  # fmt: skip
    return msgspec.structs.replace(snapshot, **more)


TROUBLE = {
    "verdicts": (
        Verdict(kind="ComputeHang", culprit=Culprit(rank=3), generation=1, first_seen_s=90.0,
                confirmed_s=91.0, confidence=1.0, reason="rank 3 stands still"),
    ),
    "recent": (IncidentRow(60.0, "signal 9", "rank 1", "restart", 0.7),
               IncidentRow(90.0, "ComputeHang", "rank 3", "restart", None)),
    "settings": {"lr": 0.1, "sync_every": 4},
    "epoch": 2,
    "cordoned": (1,),
    "devices": (DeviceRow("GPU-x", 0, (0,), (), "in use", health="failed", why="XID 79"),),
}  # fmt: skip


@pytest.mark.parametrize("count", [2, 64, 10_000])
@pytest.mark.parametrize("width", [200, 80, 40, 10])
def test_it_fits_any_width(count, width):
    lines = render_watch(picture(count, **TROUBLE), width)
    assert len(lines) <= 60
    assert max(map(len, lines)) <= max(20, width)
    assert lines[0].startswith("j running  step 120")


def test_everything_is_told_where_there_is_room():
    text = "\n".join(render_watch(picture(4, **TROUBLE), 120))
    for words in (
        "generation 1  resumable", "cordoned: node 1", "ComputeHang of rank 3",
        "rank 3: ComputeHang; restart, not over yet", "rank 1: signal 9; restart, 0.70 s",
        "change 2  lr=0.1  sync_every=4", "GPU-x on node 0: failed XID 79",
    ):  # fmt: skip
        assert words in text


def test_ten_thousand_ranks_fold_and_the_sick_one_stands_alone():
    ranks = [rank(i) for i in range(10_000)]
    ranks[4321] = rank(4321, "suspected", 119)
    head, first, *rest = render_ranks(ranks, 20)
    assert head.startswith("ranks")
    assert first.startswith("4321 ")
    assert "suspected" in first
    assert len(rest) == 1
    assert "0-4320,4322-9999" in rest[0]


def test_many_in_trouble_are_folded_as_well():
    ranks = [rank(i, "waiting" if i % 2 else "running", 100 + i % 3) for i in range(1000)]
    lines = render_ranks(ranks, 10)
    assert len(lines) <= 10
    assert "waiting" in lines[1]
    assert "100-102" in lines[1]


def test_a_control_character_in_a_reason_does_nothing_to_the_terminal():
    lines = render_watch(picture(1, reason="bad \x1b[2J\x07 words"), 80)
    assert not any("\x1b" in line or "\x07" in line for line in lines)


def test_spans():
    assert render_span([1, 2, 3, 9, 11, 12, 20, 30]) == "1-3,9,11-12,... (8)"


def test_verdicts_that_hold_come_first_and_withdrawn_ones_last():
    def verdict(at_s, generation=1, **evidence):
        return Verdict(kind="Straggler", culprit=Culprit(rank=3), generation=generation,
                       first_seen_s=at_s, confirmed_s=at_s, confidence=1.0,
                       reason=f"at {at_s:.0f}", evidence=evidence)  # fmt: skip

    snapshot = picture(
        4,
        verdicts=(
            verdict(50.0, 0),
            verdict(60.0),
            verdict(70.0, withdrawn="over"),
            verdict(80.0, 0),
        ),
    )
    assert [v.confirmed_s for v in choose_shown_verdicts(snapshot)] == [60.0, 80.0, 70.0]
    text = "\n".join(render_watch(snapshot, 120))
    assert "Straggler of rank 3: at 70 (withdrawn)" in text


def test_what_is_to_come_is_told_and_what_nobody_changed_is_not():
    own = KeySpec(name="log_level", type="str", default="", owner="perdure")
    coming = Change(epoch=3, step=500, values={"lr": 0.5})
    snapshot = picture(2, settings={"lr": 0.1, "log_level": ""}, keys=(own,), coming=(coming,))
    lines = render_watch(snapshot, 120)
    assert lines[lines.index("Configuration") + 1 :] == ["lr=0.1", "from step 500 on: lr=0.5"]
    changed = msgspec.structs.replace(snapshot, settings={"lr": 0.1, "log_level": "debug"})
    assert any("log_level=debug" in line for line in render_watch(changed, 120))


@pytest.mark.parametrize(
    ("width", "columns"),
    [(200, "ranks nodes state phase step steps/s collective"), (38, "ranks state step steps/s"),
     (26, "ranks state step")],
)  # fmt: skip
def test_columns_that_say_least_go_first(width, columns):
    assert render_ranks([rank(0), rank(1)], 10, width)[0].split() == columns.split()


def test_what_ranks_are_busy_with_is_told_first():
    ranks = [rank(i) for i in range(4)]
    for number in (0, 1, 3):
        at_most_s = 600.0 if number < 3 else 5.0
        phase = BusyPhase("evaluate", 88.0 - number, 88.0 - number + at_most_s)
        ranks[number] = msgspec.structs.replace(ranks[number], busy_phase=phase)
    snapshot = picture(4, ranks=tuple(ranks))
    lines = render_watch(snapshot, 100)
    assert lines[3:5] == [
        "rank 3 is busy: evaluate, at most 5 s, for 15 s (longer than declared: it counts no more)",
        "ranks 0-1 are busy: evaluate, at most 600 s, for 13 s",
    ]
    assert "busy: evaluate" in lines[0]
    assert render_busy(snapshot)[1] in render_snapshot(snapshot)
