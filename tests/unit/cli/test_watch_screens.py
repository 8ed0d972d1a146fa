"""The screens of `perdure watch`, by Textual's pilot: going in and back, finding, acting, poison.

What is drawn is read from the screen itself, cell by cell, as a person sees it.
"""

import json
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.journals import Story, tell
from tests.living import LivingJob
from tests.pages import lay_down
from tests.waiting import PATIENCE_S

from perdure.cli.jobs import Job, find_here
from perdure.cli.page.acts import Act
from perdure.cli.page.reading import JobReading
from perdure.cli.page.runs import name_run
from perdure.cli.watching import looking
from perdure.cli.watching.app import WatchApp
from perdure.cli.watching.asking import AskScreen
from perdure.cli.watching.job import JobScreen
from perdure.cli.watching.jobs import JobsScreen
from perdure.cli.watching.rank import RankScreen
from perdure.files.regular import read_file
from perdure.model.errors import SafetyError
from perdure.model.events import VerdictReached
from perdure.model.report import DeviceRow, RankRow, ReplicaRow, StageRow, WorldShape
from perdure.model.steering import KeySpec
from perdure.model.verdicts import Culprit, Verdict
from perdure.service import jobfiles

POISON = "[bold red]x[/] \x1b[2J\x1b]52;c;cm0K\x07\0\u202e $(reboot) [link=http://e]y"


class Watched:
    """The screens in a terminal of their own."""

    def __init__(self, app: WatchApp, pilot: Any) -> None:
        self.app, self.pilot = app, pilot

    @property
    def text(self) -> str:
        """What is on the screen."""
        width = self.app.size.width
        strips = self.app.screen._compositor.render_strips()
        return "\n".join(strip.text[:width].rstrip() for strip in strips)

    async def until(self, seen: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not seen():
            assert time.monotonic() < deadline, f"no {what}:\n{self.text}"
            await self.pilot.pause(0.02)

    async def wait(self, *words: str) -> None:
        for word in words:
            await self.until(lambda word=word: word in self.text, word)

    async def at(self, screen: type) -> None:
        await self.until(lambda: isinstance(self.app.screen, screen), screen.__name__)

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)


class Controller:
    """Answers acts as `page.acts.ask` does, and keeps them."""

    def __init__(self, refusal: str = "") -> None:
        self.asked: list[Act] = []
        self.refusal = refusal

    def ask(self, job: Job, act: Act) -> str:
        self.asked.append(act)
        if self.refusal:
            raise SafetyError(self.refusal, hint="wait")
        return f"{act.verb} would {act.value or act.target}" if act.preview else "it was done"


@asynccontextmanager
async def watch(
    home: Path, name: str = "", size: tuple[int, int] = (80, 24), controller: Any = None
) -> AsyncIterator[Watched]:
    job = find_here(name, str(home)) if name else None
    app = WatchApp(job, 0.1, asks=(controller or Controller()).ask)
    async with app.run_test(size=size, notifications=True) as pilot:
        yield Watched(app, pilot)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def living(home: Path) -> Any:
    job = LivingJob(home)
    yield job
    if job.lock >= 0:
        job.die()


def write_log(home: Path, job: str, text: bytes, rank: int = 0, generation: int = 2) -> Path:
    path = home / f"jobs/{job}/logs/ranks/g{generation}/rank-{rank}.out"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    return path


async def test_from_the_jobs_to_a_ranks_log_and_back(home: Path) -> None:
    lay_down(home)
    lay_down(home, "other")
    log = write_log(home, "job", b"first line\n")
    async with watch(home) as seen:
        await seen.at(JobsScreen)
        await seen.wait("2 jobs", "other", "done")
        await seen.press("slash", *"job", "enter")
        await seen.until(lambda: "other" not in seen.text, "filtered list")
        await seen.press("enter")
        await seen.at(JobScreen)
        await seen.wait("job done  step 105", "goodput", "exited")
        await seen.press("2")
        await seen.wait("devices")
        await seen.press("enter")
        await seen.wait("1 Ranks of node 0", "collective")
        await seen.press("down", "enter")
        await seen.at(RankScreen)
        await seen.wait("rank 1 of job: exited")
        await seen.press("escape", "up", "enter")
        await seen.wait("rank 0 of job: exited", "first line")
        with log.open("ab") as more:
            more.write(b"second line\n")
        await seen.wait("second line")
        await seen.press("3")
        await seen.wait("ComputeHang of rank 0: rank 0 is stopped")
        await seen.press("escape")
        await seen.wait("1 Ranks of node 0")
        await seen.press("escape")
        await seen.until(lambda: "of node 0" not in seen.text, "all nodes")
        await seen.press("escape")
        await seen.at(JobsScreen)


async def test_an_incident_shows_its_reason_and_its_evidence(home: Path) -> None:
    lay_down(home)
    async with watch(home, "job", (100, 40)) as seen:
        await seen.press("4")
        await seen.wait("ComputeHang (stopped)", "decided: restart, because", "2 steps lost")
        await seen.wait("ComputeHang of rank 0: rank 0 is stopped", "confidence")
        await seen.press("down", "down")
        await seen.wait("rank 1: signal 9 (SIGKILL) at step 23")
        await seen.press("8")
        await seen.wait("Ledger", "useful")
        await seen.press("6")
        await seen.wait("checkpoints/step-00000105")


async def test_finding_leaves_out_the_rest_until_escape(home: Path) -> None:
    lay_down(home)
    write_log(home, "job", b"a needle\nhay\n" + b"straw\n" * 5)
    async with watch(home, "job") as seen:
        await seen.wait("exited")
        await seen.press("7")
        await seen.wait("0: hay")
        await seen.press("slash", *"NEEDLE")
        await seen.until(lambda: "hay" not in seen.text and "a needle" in seen.text, "needle")
        await seen.press("escape")
        await seen.wait("0: hay")


async def test_nothing_is_done_before_it_was_shown_and_confirmed(living: LivingJob) -> None:
    controller = Controller()
    async with watch(living.home, "j", controller=controller) as seen:
        await seen.wait("j running", "allreduce #7")
        await seen.press("p")
        await seen.wait("Pause the job?", "pause would")
        await seen.press("n")
        await seen.at(JobScreen)
        assert [act.preview for act in controller.asked] == [True]
        await seen.press("p")
        await seen.wait("pause would")
        await seen.press("y")
        await seen.at(JobScreen)
        await seen.wait("it was done")
        assert [(act.verb, act.preview) for act in controller.asked[1:]] == [
            ("pause", True), ("pause", False),
        ]  # fmt: skip
        living.write(state="paused", paused=True)
        await seen.wait("j paused", "resume")


@pytest.mark.parametrize(
    ("keys", "verb", "target"),
    [
        (("down", "K"), "inject", "rank:1"),
        (("2", "d"), "drain", "node:0"),
        pytest.param(("2", "o"), "cordon", "node:0", marks=pytest.mark.long),
        pytest.param(("2", "e"), "evict", "node:0", marks=pytest.mark.long),
        pytest.param(("2", "R"), "restore", "node:0", marks=pytest.mark.long),
        (("3", "d"), "drain", "cpu-x-0"),
    ],
)
async def test_a_verb_is_of_what_is_chosen(
    living: LivingJob, keys: tuple[str, ...], verb: str, target: str
) -> None:
    controller = Controller()
    async with watch(living.home, "j", controller=controller) as seen:
        await seen.wait("allreduce #7")
        *way, last = keys
        await seen.press(*way)
        await seen.wait({"2": "1 device", "3": "cpu-x-0"}.get(keys[0], "allreduce"))
        await seen.until(lambda: seen.app.focused is not None and seen.app.focused.id, "focus")
        await seen.press(last)
        await seen.wait(f"{verb} would {target}")
        if verb in ("evict", "inject"):  # Enter alone does nothing that is grave.
            await seen.press("enter")
            await seen.at(JobScreen)
            assert all(act.preview for act in controller.asked)
        else:
            await seen.press("y")
            await seen.wait("it was done")
            run = name_run(find_here("j", str(living.home)))
            assert controller.asked[-1] == Act(verb=verb, target=target, preview=False, run=run)


async def test_a_setting_is_set_to_what_was_typed(living: LivingJob) -> None:
    lr = KeySpec(name="lr", type="float", default=0.1, note="learning rate")
    living.write(keys=(lr,), settings={"lr": 0.1})
    controller = Controller()
    async with watch(living.home, "j", controller=controller) as seen:
        await seen.wait("allreduce #7")
        await seen.press("s")
        await seen.wait("learning rate")
        await seen.press("s")
        await seen.wait("Set lr to:", "set would 0.1")
        await seen.press("end", "5")
        await seen.wait("set would 0.15")
        await seen.press("enter")
        await seen.until(lambda: getattr(seen.app.focused, "id", "") == "ask-yes", "button")
        await seen.press("enter")
        await seen.wait("it was done")
        run = name_run(find_here("j", str(living.home)))
        wanted = Act(verb="set", key="lr", value="0.15", preview=False, run=run)
        assert controller.asked[-1] == wanted


async def test_a_dialog_is_of_the_job_that_was_shown_and_of_none_that_began_since(
    living: LivingJob,
) -> None:
    controller = Controller()
    run = name_run(find_here("j", str(living.home)))
    async with watch(living.home, "j", controller=controller) as seen:
        await seen.wait("allreduce #7")
        await seen.press("S")
        await seen.wait("stop would")
        spec = (living.root / "job.json").read_bytes()
        (living.root / "new").write_bytes(spec)
        (living.root / "new").replace(living.root / "job.json")
        living.write(step=1)
        await seen.press("y")
        await seen.wait("it was done")
        assert controller.asked[-1].run == run != name_run(find_here("j", str(living.home)))


async def test_what_is_refused_cannot_be_confirmed(living: LivingJob) -> None:
    controller = Controller(refusal=f"no spare node is ready {POISON}")
    async with watch(living.home, "j", controller=controller) as seen:
        await seen.wait("allreduce #7")
        await seen.press("p")
        await seen.wait("no spare node is ready [bold red]x[/]", "(wait)")
        await seen.press("y")
        await seen.press("enter")
        await seen.at(JobScreen)
        assert all(act.preview for act in controller.asked)


async def test_a_controller_that_does_not_answer_is_told(living: LivingJob) -> None:
    from perdure.cli.page.acts import ask

    class Real:
        def ask(self, job: Job, act: Act) -> str:
            return ask(job, act)

    async with watch(living.home, "j", controller=Real()) as seen:
        await seen.wait("allreduce #7")
        await seen.press("p")
        await seen.at(AskScreen)
        await seen.until(lambda: "is asked what that would do" not in seen.text, "refusal")
        await seen.press("y")
        assert isinstance(seen.app.screen, AskScreen)


async def test_poison_is_shown_as_what_it_is(home: Path) -> None:
    story = tell(Story())
    story.write(
        VerdictReached(
            verdict=Verdict(
                kind="Straggler", culprit=Culprit(rank=0), generation=2, first_seen_s=story.now,
                confirmed_s=story.now, confidence=1.0, reason=POISON.replace("\0", ""),
                evidence={"traceback": POISON[:-1] * 3, "stacks": {"0": "[b]at[/b] " * 9}},
            ),
        )
    )  # fmt: skip
    lay_down(home, story=story)
    ten_mb = b"[blink]" + b"z" * 10_000_000 + b"\n"
    write_log(home, "job", ten_mb + POISON.encode() + b"\xff\xfe\n\x1b[31mred\x1b[0m [i]end\n")
    async with watch(home, "job", (120, 40)) as seen:
        await seen.wait("exited")
        await seen.press("4")
        await seen.wait("[bold red]x[/] \\x1b[2J\\x1b]52;c;cm0K", "[link=http://e]y")
        await seen.press("1", "enter")
        await seen.at(RankScreen)
        await seen.wait("[bold red]x[/] \\x1b[2J", "\\u202e", "red [i]end")
        await seen.press("2")
        await seen.wait("[b]at[/b]")
        assert not [c for c in seen.text if not c.isprintable() and c != "\n"]


async def test_poison_in_names_and_rows(living: LivingJob) -> None:
    rank = RankRow(0, 0, 9, POISON, POISON, 7, 8.0, POISON, 1.0, 1)
    device = DeviceRow(POISON, 0, (0,), (), "lost", ("node0/slot0",), why=POISON)
    living.write(ranks=(rank,), devices=(device,), reason=POISON * 1000)
    async with watch(living.home, "j", (200, 24)) as seen:
        for key, words in (("1", "collective"), ("2", "lost"), ("3", "slots")):
            await seen.press(key)
            await seen.wait(words, "[bold red]x[/]")
            assert not [c for c in seen.text if not c.isprintable() and c != "\n"]


async def test_the_end_is_told_and_takes_the_keys_that_act(living: LivingJob) -> None:
    controller = Controller()
    async with watch(living.home, "j", controller=controller) as seen:
        await seen.wait("j running", "pause")
        living.write(state="done", step=10, reason="every rank ended")
        await seen.wait("j done  step 10", "every rank ended")
        await seen.until(lambda: "pause" not in seen.text, "footer without verbs")
        await seen.press("p", "K", "d")
        assert isinstance(seen.app.screen, JobScreen)
        assert not controller.asked


async def test_a_run_that_was_killed_and_a_silent_controller_are_told(living: LivingJob) -> None:
    async with watch(living.home, "j") as seen:
        await seen.wait("j running")
        # A machine that has just been started has a clock near 0, and job time does not.
        endpoint = {"url": "nats://127.0.0.1:1", "token": "", "clock_offset_s": 9_000_000.0}
        (living.root / "endpoint.json").write_text(json.dumps(endpoint))
        at_s = time.monotonic() + 9_000_000.0 - 6_000_000.0
        living.picture = msgspec.structs.replace(living.picture, at_s=at_s)
        (living.root / "state.json").write_bytes(msgspec.json.encode(living.picture))
        await seen.wait("the controller has said nothing for 600")
        living.die()
        await seen.wait("j lost", "the same --name resumes it")


async def test_a_folder_that_vanishes_is_told(living: LivingJob) -> None:
    async with watch(living.home, "j") as seen:
        await seen.wait("j running")
        shutil.rmtree(living.root)
        await seen.wait("the job's folder is gone", "j running")
        await seen.press("escape")
        await seen.wait("There are no jobs yet")


async def test_a_picture_that_cannot_be_read_is_told_until_it_can(living: LivingJob) -> None:
    async with watch(living.home, "j") as seen:
        await seen.wait("j running")
        (living.root / "state.json").write_bytes(b"[bold]{")
        (living.root / "journal.jsonl").mkdir()
        await seen.wait("Nothing new can be read")
        (living.root / "journal.jsonl").rmdir()
        living.write(step=12)
        await seen.wait("j running  step 12")
        await seen.until(lambda: "Nothing new" not in seen.text, "end of the trouble")


async def test_a_disk_that_does_not_answer_is_told_until_it_does(
    living: LivingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "_PATIENCE_S", 0.2)
    async with watch(living.home, "j") as seen:
        await seen.wait("j running")
        answers = threading.Event()

        def read(path: str) -> bytes:
            assert answers.wait(PATIENCE_S)
            return read_file(path)

        monkeypatch.setattr(jobfiles, "read_file", read)
        try:
            await seen.wait("Nothing new can be read: not read in")
        finally:
            living.write(step=13)
            answers.set()
        await seen.wait("j running  step 13")
        await seen.until(lambda: "Nothing new" not in seen.text, "end of the trouble")


async def test_a_job_that_cannot_be_read_is_named_beside_the_others(living: LivingJob) -> None:
    bad = living.home / "jobs" / "bad"
    bad.mkdir()
    (bad / "job.json").write_bytes(b"[bold]{\x1b[2J")
    async with watch(living.home) as seen:
        await seen.wait("1 job, 1 running", "perdure: bad: ")


async def test_what_comes_before_a_tab_is_drawn_is_shown_once_it_is(home: Path) -> None:
    lay_down(home)
    async with watch(home, "job") as seen:
        reading = JobReading(find_here("job", str(home)))
        picture, screen = reading.look(), RankScreen(reading, 0, 60.0)
        assert picture.snapshot is not None
        screen.show_picture(picture.snapshot, picture)
        await seen.app.push_screen(screen)
        await seen.press("3")
        await seen.wait("ComputeHang of rank 0: rank 0 is stopped")


async def test_replica_groups_and_stages_have_a_tab_where_there_are_any(living: LivingJob) -> None:
    controller = Controller()
    async with watch(living.home, "j", controller=controller) as seen:
        await seen.wait("8 Time")
        await seen.press("9")
        assert "9 Groups" not in seen.text
        lost = ReplicaRow(1, "late:b", 1, "silent", 6, -1, why="not heard of for 5 s")
        well = ReplicaRow(0, "early:a", 0, "training", 7, 3)
        stages = StageRow((0, 5), (0,)), StageRow((5, 8), (1,))
        living.write(replicas=(well, lost), world=WorldShape(3, "1x2", 56, stages))
        await seen.wait("9 Groups")
        await seen.press("9")
        await seen.wait("stage 0", "blocks 5-7", "group 0", "in quorum 3", "not heard of for 5 s")
        await seen.press("d")
        await seen.wait("drain of what?")
        await seen.press("G", "d")
        await seen.wait("drain would replica:1")
        await seen.press("escape")
        living.write(replicas=(), world=None)
        await seen.until(lambda: "9 Groups" not in seen.text, "tab that is gone")
        await seen.wait("collective")


async def test_ten_thousand_ranks_are_nodes(living: LivingJob) -> None:
    def ranks(step: int) -> tuple[RankRow, ...]:
        rows = [
            RankRow(i, i // 8, 1, "running", "step", step, 8.0, "", 1.0, 1) for i in range(10_000)
        ]
        rows[4321] = msgspec.structs.replace(rows[4321], state="suspected")
        return tuple(rows)

    living.write(ranks=ranks(7), world_size=10_000)
    async with watch(living.home, "j") as seen:
        await seen.wait("10000 ranks", "1 suspected")
        rows = [line for line in seen.text.splitlines() if "running" in line][1:]
        assert rows[0].split()[0] == "540"  # Whoever is in trouble comes first.
        living.write(ranks=ranks(8), step=8)
        await seen.wait("j running  step 8")
        await seen.press("down", "down", "up", "pagedown", "pageup", "G", "g")
        await seen.press("enter")
        await seen.wait("1 Ranks of node 540", "4321", "suspected")
        await seen.press("escape", "1")
        await seen.wait("1 Ranks ", "0-4320")


@pytest.mark.parametrize(
    "size",
    [
        pytest.param((40, 10), marks=pytest.mark.long),
        (20, 5),
        pytest.param((200, 60), marks=pytest.mark.long),
    ],
)
async def test_any_size_is_drawn(home: Path, size: tuple[int, int]) -> None:
    lay_down(home)
    async with watch(home, "job", size) as seen:
        await seen.wait("job done")
        for key in "12345678":
            await seen.press(key)
        await seen.press("question_mark", "escape", "1", "enter")
        await seen.at(RankScreen)


async def test_the_keys_are_listed(living: LivingJob) -> None:
    async with watch(living.home, "j") as seen:
        await seen.wait("allreduce #7")
        await seen.press("question_mark")
        await seen.wait("evict the node", "undo the newest change", "kill a rank", "find")
        await seen.press("escape")
        await seen.at(JobScreen)
