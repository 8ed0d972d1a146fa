"""Real transfers on loopback, and what a stranger at the door gets."""

import socket
import threading
from functools import partial

import pytest

from perdure.adapters.transfer import Listener, answer_transfer, run_arithmetic, run_transfer
from perdure.model.errors import PlatformError

SIZE = 3_000_001


def _serve(listener: Listener, deadline_s: float = 20.0) -> threading.Thread:
    answer = partial(answer_transfer, size=SIZE)
    thread = threading.Thread(target=listener.serve, args=(answer, deadline_s))
    thread.start()
    return thread


def test_both_directions_are_timed_and_the_door_closes() -> None:
    listener = Listener("127.0.0.1")
    thread = _serve(listener)
    moved = run_transfer(
        listener.host, listener.port, listener.token, source="127.0.0.1", size=SIZE, deadline_s=20.0
    )
    thread.join(20.0)
    assert moved.error == ""
    assert 0 < moved.rtt_s < moved.there_s + moved.back_s < 20.0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((listener.host, listener.port), timeout=5.0)


def test_a_stranger_is_refused_and_does_not_use_the_door_up() -> None:
    listener = Listener("127.0.0.1")
    thread = _serve(listener)
    socket.create_connection((listener.host, listener.port), timeout=5.0).close()
    refused = run_transfer(
        listener.host, listener.port, "x" * 16, source="", size=SIZE, deadline_s=20.0
    )
    assert refused.there_s == 0.0
    assert refused.error.startswith("there: ")
    assert run_transfer(
        listener.host, listener.port, listener.token, source="", size=SIZE, deadline_s=20.0
    ).back_s
    thread.join(20.0)


def test_a_source_that_cannot_reach_the_door_is_left_to_the_kernel() -> None:
    listener = Listener("127.0.0.1")
    thread = _serve(listener)
    moved = run_transfer(
        listener.host,
        listener.port,
        listener.token,
        source="192.0.2.77",
        size=SIZE,
        deadline_s=20.0,
    )
    thread.join(20.0)
    assert moved.back_s > 0


def test_a_transfer_that_stalls_ends_at_its_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # Accepts, and never answers.
        moved = run_transfer(
            "127.0.0.1", silent.getsockname()[1], "t" * 16, source="", size=SIZE, deadline_s=0.05
        )
    assert (moved.there_s, moved.back_s) == (0.0, 0.0)
    assert moved.error == "there: timed out"


def test_a_door_nobody_comes_to_closes_at_its_deadline() -> None:
    listener = Listener("127.0.0.1")
    thread = _serve(listener, deadline_s=0.02)
    thread.join(20.0)
    assert not thread.is_alive()


def test_no_door_on_an_address_that_is_not_ours() -> None:
    with pytest.raises(PlatformError, match=r"cannot listen on 192\.0\.2\.77"):
        Listener("192.0.2.77")


def test_arithmetic_takes_time_or_does_not_end() -> None:
    assert run_arithmetic(60.0) > 0.0
    assert run_arithmetic(0.001) == 0.0
