"""`run.busy`: what a rank shows of it in its ring, and what it refuses (row T5)."""

import math
import threading
import time

import pytest
from tests.rings import read_stages
from tests.waiting import PATIENCE_S

import perdure
from perdure.adapters.rings import read_ring
from perdure.model import ring as layout
from perdure.model.errors import ConfigError
from perdure.worker import attach
from perdure.worker.busy import AT_MOST_S_MAX, declare_busy
from perdure.worker.recording.stages import StepStamps
from perdure.worker.ring import RingWriter


@pytest.fixture
def ring(tmp_path, monkeypatch):
    """Return a function that reads the ring of this process, which is a rank meanwhile."""
    path = str(tmp_path / "g0-r0.ring")
    writer = RingWriter.create(path, rank=0, generation=0)
    monkeypatch.setattr(attach, "_attachment", attach.Attachment(writer))
    yield lambda: read_ring(path, 0.0)
    writer.close()


def test_it_is_shown_with_its_end_and_gone_afterwards(ring):
    before = ring().heartbeat_s
    with declare_busy("evaluate", at_most_s=60):
        reading = ring()
        phase = reading.busy_phase
        assert phase.name == "evaluate"
        assert phase.until_s - phase.since_s == pytest.approx(60)
        assert reading.progress(layout.ProcSample()).busy_phase == phase
        assert reading.heartbeat_s > before
        assert phase.describe(phase.since_s + 12) == "evaluate, at most 60 s, for 12 s"
    assert ring().busy_phase is None
    assert ring().heartbeat_s > reading.heartbeat_s  # Its end is something that the script did.


def test_phases_nest_and_the_latest_end_counts(ring):
    with declare_busy("epoch", at_most_s=600):
        with declare_busy("save", at_most_s=60):
            assert ring().busy_phase.name == "epoch"
        assert ring().busy_phase.name == "epoch"
        with declare_busy("evaluate", at_most_s=900):
            assert ring().busy_phase.name == "evaluate"
        assert ring().busy_phase.name == "epoch"
    assert ring().busy_phase is None


def test_it_ends_with_an_exception_and_hides_none(ring):
    phase = declare_busy("save", at_most_s=5)
    for _ in range(2):  # A phase may be kept and used again.
        with pytest.raises(ZeroDivisionError), phase, phase:
            raise ZeroDivisionError
        assert ring().busy_phase is None


def test_threads_may_declare_beside_each_other(ring):
    """A phase that a thread has forgotten would hide every hang for as long as it may last."""

    def declare():
        for _ in range(300):
            with declare_busy("save", at_most_s=30):
                pass

    threads = [threading.Thread(target=declare) for _ in range(4)]
    with declare_busy("epoch", at_most_s=600):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert ring().busy_phase.name == "epoch"
        assert not ring().torn
    assert ring().busy_phase is None


@pytest.mark.parametrize(
    "wrong", [0, -1, math.nan, math.inf, AT_MOST_S_MAX + 1, "600", True, None, [1], 10**400]
)
def test_a_wrong_time_is_one_clear_line(wrong):
    with pytest.raises(ConfigError, match=r"busy: at_most_s is a number of seconds above 0") as e:
        declare_busy("evaluate", at_most_s=wrong)
    assert "\n" not in str(e.value)
    assert len(str(e.value)) < 300


@pytest.mark.parametrize("wrong", ["", "  ", None, 7, b"evaluate"])
def test_a_wrong_name_is_one_clear_line(wrong):
    with pytest.raises(ConfigError, match="the name of a phase is a word"):
        declare_busy(wrong, at_most_s=1)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("auswerten: größe", "auswerten: größe"),
        ("\x1b]52;c;aGk=\x07", "?]52;c;aGk=?"),
        ("\ud800", "?"),
        ("e" * 10_000_000, "e" * 60),
        ("é" * 60, "é" * 31),
    ],
)
def test_any_name_can_be_shown(ring, name, shown):
    with declare_busy(name, at_most_s=1):
        assert ring().busy_phase.name.rstrip("\N{REPLACEMENT CHARACTER}") == shown


def test_without_perdure_it_does_nothing(monkeypatch):
    monkeypatch.delenv("PERDURE_RING", raising=False)
    monkeypatch.setattr(attach, "_attachment", None)
    run = perdure.init()
    with run.busy("evaluate", at_most_s=1.5):
        pass
    with pytest.raises(ConfigError):
        run.busy("evaluate", at_most_s=-1)
    with pytest.raises(TypeError, match="at_most_s"):
        run.busy("evaluate")  # type: ignore[call-arg]


def test_its_time_is_no_part_of_a_step(ring, monkeypatch):
    """Else a rank that evaluates for the others is a straggler."""

    class Recorder:
        def blocked_ns(self):
            return 0

    began_ns, later_ns = time.monotonic_ns(), [0]
    monkeypatch.setattr(time, "monotonic_ns", lambda: began_ns + later_ns[0])
    attachment = attach._attachment
    attachment.stages = StepStamps(attachment.ring, Recorder())
    attachment.stages.begin_declared(time.monotonic_ns())
    with declare_busy("evaluate", at_most_s=5), declare_busy("save", at_most_s=5):
        later_ns[0] += 200_000_000
        attachment.stages.mark(0)  # Its data is no step's either.
        attachment.stages.mark(0)
    attachment.stages.end_declared(1, time.monotonic_ns(), 0)
    (stages,) = read_stages(attachment.ring.path, 0.0)
    assert stages.end_s - stages.begin_s < 0.15
    parts = stages.data_s + stages.forward_s + stages.backward_s + stages.optimizer_s
    parts += stages.wait_s + stages.other_s
    assert parts == pytest.approx(stages.end_s - stages.begin_s, abs=1e-4)
