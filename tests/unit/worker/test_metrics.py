"""What a script may log: everything; what is told of it is bounded, and what is not is counted."""

import io
import math
import sys
from typing import Any

import numpy as np
import pytest
import torch

from perdure.model.codec import decode, encode
from perdure.model.events import MetricsLogged
from perdure.worker import metrics
from perdure.worker.metrics import BATCH_BYTES_MAX, NAMES_MAX, MetricsBuffer


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[MetricsLogged]:
    """Nothing is sent but by `flush`."""
    monkeypatch.setattr(metrics, "INTERVAL_S", 1e9)
    return []


def make_buffer(sent: list[Any]) -> MetricsBuffer:
    return MetricsBuffer(1, sent.append)


class Rude:
    def __float__(self) -> float:
        raise KeyboardError

    def __repr__(self) -> str:
        raise KeyboardError


class KeyboardError(Exception):
    def __str__(self) -> str:
        return "\udcff\x1b[2J" * 1_000_000


def test_everything_may_be_logged_and_numbers_arrive(
    sent: list[MetricsLogged], capsys: pytest.CaptureFixture[str]
) -> None:
    """T1: a script does not end for what it logs, nor does the stream."""
    buffer = make_buffer(sent)
    buffer.add(
        3,
        {
            "nan": math.nan, "inf": torch.tensor(math.inf), "half": np.float16(0.5), "bool": True,
            "big": 2**63, "tensor": torch.tensor([2.0]), "text": "1.5", "": 1, "lo\udcffss": 2,
            "n" * 10_000_000: 3, "\x1b]0;x\x07": 4,
            "vector": torch.ones(3), "words": "x" * 10_000_000, "none": None, "huge": 10**400,
            "list": [1], "rude": Rude(), "bytes": b"\xff",
        },
    )  # fmt: skip
    buffer.flush()
    (event,) = sent
    assert event.dropped == 7
    assert len(encode(event)) < 2000
    (row,) = decode(encode(event), MetricsLogged).rows
    assert row[0] == 3
    assert math.isnan(row[1].pop("nan"))
    assert row[1].pop("n" * 199 + "…") == 3.0
    assert row[1] == {
        "inf": math.inf, "half": 0.5, "bool": 1.0, "big": 2.0**63, "tensor": 2.0, "text": 1.5,
        "": 1.0, "lo\\udcffss": 2.0, "\\x1b]0;x\\x07": 4.0,
    }  # fmt: skip
    said = capsys.readouterr().err
    assert "run.log: vector is no number but Tensor: " in said
    assert len(said) < 5000
    assert "\x1b" not in said


def test_a_fast_loop_is_thinned_and_its_end_is_told(sent: list[MetricsLogged]) -> None:
    """T3: bytes are bounded at the source, and what is left out is counted."""
    buffer = make_buffer(sent)
    for step in range(20_000):
        buffer.add(step, {'lo"ss': step / 3, "läuft": -math.inf})
    buffer.flush()
    (event,) = sent
    assert len(encode(event)) <= BATCH_BYTES_MAX + 200
    assert event.rows[-1] == (19_999, {'lo"ss': 19_999 / 3, "läuft": -math.inf})
    assert event.dropped + sum(len(values) for _, values in event.rows) == 40_000
    assert event.rows[0][0] < 1000


def test_names_are_bounded(sent: list[MetricsLogged], capsys: pytest.CaptureFixture[str]) -> None:
    buffer = make_buffer(sent)
    for step in range(100):
        buffer.add(step, {f"m{step}.{n}": 1.0 for n in range(1000)})
    buffer.flush()
    assert len({name for _, values in sent[0].rows for name in values} | set(buffer.last)) <= 512
    assert sent[0].dropped >= 100_000 - NAMES_MAX
    assert len(encode(sent[0])) <= BATCH_BYTES_MAX + 200
    assert len(capsys.readouterr().err.splitlines()) == 10


class Nameless(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise KeyboardError


class Shy(metaclass=Nameless):
    pass


class Name(str):
    def __getitem__(self, where: Any) -> str:
        raise KeyboardError

    __iter__ = __len__ = encode = __str__ = __getitem__  # type: ignore[assignment]


def test_names_and_complaints_end_no_script_whatever_they_do(
    sent: list[MetricsLogged], monkeypatch: pytest.MonkeyPatch
) -> None:
    """T1: a name that is no plain text, a class without a name, a standard error that is closed."""
    buffer = make_buffer(sent)
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    buffer.add(1, {Name("loss"): 1.0, "shy": Shy(), "none": None})
    monkeypatch.undo()
    buffer.flush()
    assert sent == [MetricsLogged(generation=1, rows=((1, {"loss": 1.0}),), dropped=2)]
