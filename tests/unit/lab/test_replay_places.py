"""What a live replay refuses, and places that keep a node's processes from starting."""

import os
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S, wait_until

from perdure.cli.speech.say import hear_stop
from perdure.drill.gates import Gates, kill_nodes
from perdure.files import is_locked
from perdure.model.errors import ConfigError, SafetyError
from perdure.service.jobfiles import Parts, write_document
from perdure.service.jobfolders import paths_of
from perdure.service.processes import find_by_title
from perdure_lab.live.session import NODES_MAX, check_rising, check_trace
from perdure_lab.policies.throughput import Shape, Throughput
from perdure_lab.traces import AvailabilityTrace, Stay, TraceNode


def make(*stays: tuple[float, float | None]) -> AvailabilityTrace:
    nodes = tuple(TraceNode(f"n{i}", (Stay(b, e),)) for i, (b, e) in enumerate(stays))
    return AvailabilityTrace("t", 100.0, nodes)


def test_a_trace_that_leaves_nobody_is_refused() -> None:
    assert check_trace(make((0.0, 50.0), (40.0, None))) == 2
    with pytest.raises(SafetyError, match=r"no node at 50\.0 s"):
        check_trace(make((0.0, 50.0), (60.0, None)))
    with pytest.raises(SafetyError, match="9 nodes at once"):
        check_trace(make(*[(0.0, None)] * (NODES_MAX + 1)))


def test_a_machine_on_which_a_node_more_is_no_faster_is_refused() -> None:
    def table(*rates: float) -> Throughput:
        by_shape = {Shape(n, 1): rate for n, rate in enumerate(rates, 1)}
        return Throughput("t", by_shape, global_batch=56, state_bytes=1, source="a test")

    check_rising(table(10.0, 19.0, 27.0))
    with pytest.raises(SafetyError, match="3 nodes are no faster here than 2"):
        check_rising(table(41.0, 79.0, 64.0))


def test_a_node_is_kept_away_until_it_is_let_or_its_keeper_is_gone(tmp_path: Path) -> None:
    paths = paths_of(str(tmp_path), "mine")
    gates = Gates(paths)
    gates.shut([1, 2])
    kept = [node for node in range(3) if is_locked(paths.kept_away(node))]
    assert kept == [1, 2]
    gates.open([1])
    assert not is_locked(paths.kept_away(1))
    gates.free()
    assert not Path(paths.away).exists()


def test_two_plays_do_not_take_the_nodes_of_one_job(tmp_path: Path) -> None:
    paths = paths_of(str(tmp_path), "mine")
    gates = Gates(paths)
    gates.claim()
    with pytest.raises(ConfigError, match="a trace is being played against job `mine`"):
        Gates(paths).claim()
    gates.free()
    Gates(paths).claim()


def test_a_process_is_found_by_its_whole_title() -> None:
    """Node 1 is not node 10."""
    words = ["bash", "-c", 'exec -a "perdure keeper titled 10" sleep 60']
    with subprocess.Popen(words) as process:
        try:
            wait_until(lambda: find_by_title("perdure keeper titled 10") == [process.pid])
            assert find_by_title("perdure keeper titled 1") == []
        finally:
            process.kill()


def test_a_job_of_the_same_name_below_another_home_is_left_alone(tmp_path: Path) -> None:
    """Nor is who has the number now of an agent that has ended."""
    home = tmp_path / "mine"
    title = 'exec -a "perdure keeper twin 1" sleep 60'
    with ExitStack() as stack:

        def start(whose: Path) -> "subprocess.Popen[bytes]":
            env = os.environ | {"PERDURE_JOB": "twin", "PERDURE_HOME": str(whose)}
            process = subprocess.Popen(["bash", "-c", title], env=env)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        mine, theirs = start(home), start(tmp_path / "theirs")
        stranger = subprocess.Popen(["sleep", "60"])
        stack.callback(stranger.wait)
        stack.callback(stranger.kill)
        paths = paths_of(str(home), "twin")
        os.makedirs(paths.root)
        parts = Parts(started_s=0.0, run=0, agents={1: stranger.pid})
        write_document(paths.parts, parts)
        found = {mine.pid, theirs.pid}
        wait_until(lambda: {*find_by_title("perdure keeper twin 1")} == found)
        (tmp_path / "link").symlink_to(home)
        assert kill_nodes("twin", str(tmp_path / "link"), [1]) == 1
        assert mine.wait(PATIENCE_S) == -signal.SIGKILL
        assert (theirs.poll(), stranger.poll()) == (None, None)


def test_a_hang_up_ends_a_play_but_under_nohup() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        for found, then in (
            (signal.SIG_DFL, signal.default_int_handler),
            (signal.SIG_IGN, signal.SIG_IGN),
        ):
            signal.signal(signal.SIGHUP, found)
            hear_stop()
            assert signal.getsignal(signal.SIGHUP) is then
            assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
