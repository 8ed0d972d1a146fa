"""What `perdure run` says of where a script without steps began again."""

from pathlib import Path

from perdure.model.job import JobSpec
from perdure.model.paths import job_paths
from perdure.service.restarts import RestartWatch


def make_watch(home: Path) -> RestartWatch:
    paths = job_paths(str(home), "j", str(home), str(home))
    return RestartWatch(paths, JobSpec(name="j", script="train.py", nproc=1))


def test_a_job_that_was_never_restarted_is_warned_of_nothing(tmp_path: Path) -> None:
    """The first snapshot is from before the first start, and the script runs for a long time."""
    watch = make_watch(tmp_path)
    for now_s, generation in ((0.0, -1), (1.0, 0), (1e3, 0), (1e6, 0)):
        assert watch.tell(generation, declares_steps=False, now_s=now_s) == ""


def test_a_restart_of_a_script_that_prints_nothing_is_told_once(tmp_path: Path) -> None:
    watch = make_watch(tmp_path)
    assert watch.tell(-1, declares_steps=False, now_s=0.0) == ""
    assert watch.tell(0, declares_steps=False, now_s=1.0) == ""
    assert watch.tell(1, declares_steps=False, now_s=2.0) == ""
    assert "what was lost is not known" in watch.tell(1, declares_steps=False, now_s=1e6)
    assert watch.tell(1, declares_steps=False, now_s=2e6) == ""
