"""Real transfers on loopback, and what a stranger at the door gets."""

import contextlib
import gc
import socket
import threading
import time
from functools import partial

import pytest
from tests.waiting import PATIENCE_S

from perdure.adapters.network import transfer
from perdure.adapters.network.transfer import (
    Listener,
    answer_transfer,
    run_arithmetic,
    run_transfer,
)
from perdure.model.errors import PlatformError

SIZE = 3_000_001


def _serve(listener: Listener, deadline_s: float = PATIENCE_S) -> threading.Thread:
    answer = partial(answer_transfer, size=SIZE)
    thread = threading.Thread(target=listener.serve, args=(answer, deadline_s))
    thread.start()
    return thread


def test_both_directions_are_timed_and_the_door_closes() -> None:
    listener = Listener("127.0.0.1")
    thread = _serve(listener)
    began_s = time.monotonic()
    moved = run_transfer(
        listener.host, listener.port, listener.token, source="127.0.0.1", size=SIZE,
        deadline_s=PATIENCE_S,
    )  # fmt: skip
    took_s = time.monotonic() - began_s
    thread.join(PATIENCE_S)
    assert moved.error == ""
    assert min(moved.rtt_s, moved.there_s, moved.back_s) > 0
    assert moved.rtt_s + moved.there_s + moved.back_s < took_s
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((listener.host, listener.port), timeout=PATIENCE_S)


def test_a_stranger_is_refused_and_does_not_use_the_door_up() -> None:
    listener = Listener("127.0.0.1")
    thread = _serve(listener)
    socket.create_connection((listener.host, listener.port), timeout=PATIENCE_S).close()
    refused = run_transfer(
        listener.host, listener.port, "x" * 16, source="", size=SIZE, deadline_s=PATIENCE_S
    )
    assert refused.there_s == 0.0
    assert refused.error.startswith("there: ")
    assert run_transfer(
        listener.host, listener.port, listener.token, source="", size=SIZE, deadline_s=PATIENCE_S
    ).back_s
    thread.join(PATIENCE_S)


def _connect_silent(listener: Listener, count: int) -> list[socket.socket]:
    place = listener.host, listener.port
    return [socket.create_connection(place, timeout=PATIENCE_S) for _ in range(count)]


def test_who_says_nothing_has_no_other_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_TOKEN_S", 3600.0)
    listener = Listener("127.0.0.1")
    thread = _serve(listener)
    silent = _connect_silent(listener, 10)
    silent[0].sendall(listener.token[:-1].encode())
    moved = run_transfer(
        listener.host, listener.port, listener.token, source="", size=SIZE, deadline_s=PATIENCE_S
    )
    thread.join(PATIENCE_S)
    assert moved.error == ""
    for each in silent:
        assert each.recv(1) == b"", "there is one peer"
        each.close()


def test_who_shows_no_token_is_dropped_and_they_are_bounded_in_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "_TOKEN_S", 3600.0)
    listener = Listener("127.0.0.1")
    thread = _serve(listener)
    silent = _connect_silent(listener, 40)
    for each in silent[:8]:
        assert each.recv(1) == b"", "the oldest give way"
    silent[8].settimeout(0.05)
    with pytest.raises(TimeoutError):
        silent[8].recv(1)
    monkeypatch.setattr(transfer, "_TOKEN_S", 0.01)
    late = _connect_silent(listener, 1)
    assert late[0].recv(1) == b"", "a second is enough to show it"
    in_pieces = silent.pop()
    for byte in listener.token.encode():
        in_pieces.sendall(bytes([byte]))
    in_pieces.sendall(b"?")
    assert in_pieces.recv(1) == b"?"
    for each in (*silent, *late, in_pieces):
        each.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("known", [False, True], ids=["waiting", "answering"])
def test_a_door_that_is_closed_ends_whatever_it_does(known: bool) -> None:
    listener = Listener("127.0.0.1")
    thread = _serve(listener, deadline_s=3600.0)
    with _connect_silent(listener, 1)[0] as peer:
        if known:
            peer.sendall(listener.token.encode() + b"?")
            assert peer.recv(1) == b"?"
        listener.close()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        with contextlib.suppress(ConnectionResetError):
            assert peer.recv(1) == b""


def test_a_door_that_is_closed_before_anybody_serves_is_none() -> None:
    listener = Listener("127.0.0.1")
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((listener.host, listener.port), timeout=PATIENCE_S)
    del listener
    gc.collect()  # A socket that was left open would be told of.
    late = Listener("127.0.0.1")
    late.close()
    thread = _serve(late, deadline_s=3600.0)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_source_that_cannot_reach_the_door_is_left_to_the_kernel() -> None:
    listener = Listener("127.0.0.1")
    thread = _serve(listener)
    moved = run_transfer(
        listener.host,
        listener.port,
        listener.token,
        source="192.0.2.77",
        size=SIZE,
        deadline_s=PATIENCE_S,
    )
    thread.join(PATIENCE_S)
    assert moved.back_s > 0


def test_a_transfer_that_stalls_ends_at_its_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # Accepts, and never answers.
        moved = run_transfer(
            "127.0.0.1", silent.getsockname()[1], "t" * 16, source="", size=SIZE, deadline_s=0.05
        )
    assert (moved.there_s, moved.back_s) == (0.0, 0.0)
    assert moved.error in ("there: timed out", "there: not in time")  # In a call, or before one.


def test_a_door_nobody_comes_to_closes_at_its_deadline() -> None:
    listener = Listener("127.0.0.1")
    thread = _serve(listener, deadline_s=0.02)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_no_door_on_an_address_that_is_not_ours() -> None:
    with pytest.raises(PlatformError, match=r"cannot listen on 192\.0\.2\.77"):
        Listener("192.0.2.77")


def test_arithmetic_takes_time_or_does_not_end() -> None:
    assert run_arithmetic(PATIENCE_S) > 0.0
    assert run_arithmetic(0.001) == 0.0
