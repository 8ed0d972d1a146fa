"""Four causes for a job whose `perdure run` is gone, each told by what it leaves behind."""

from perdure.model.events import CommandReceived, JobEnded, JournalEntry, NodeRegistered, RankExited
from perdure.model.failures import ExitRecord
from perdure.model.platforms.outcome import Outcome
from perdure.model.signals.progress import RankAccount
from perdure.telemetry.outcome import RUN_LOST, HostFacts, Signs, explain_vanishing, judge_outcome

HERE = NodeRegistered(node=0, incarnation="a", host="h", boot_id="boot-1", slots=1)
SAME = HostFacts(boot_id="boot-1")


def journal(*events: object) -> list[JournalEntry]:
    return [
        JournalEntry(seq=number, at_s=100.0 + number, body=event)  # type: ignore[arg-type]
        for number, event in enumerate(events, 1)
    ]


def find_cause(entries: list[JournalEntry], facts: HostFacts, *pids: int) -> str | None:
    found = explain_vanishing(entries, facts, pids)
    return found.cause if found else None


def test_another_boot_explains_everything() -> None:
    log = ("Out of memory: Killed process 41 (perdure)",)
    facts = HostFacts(boot_id="boot-2", kernel_log=log)
    assert find_cause(journal(HERE), facts, 41) == "reboot"


def test_a_machine_that_was_gone_before_anything_was_journaled() -> None:
    assert find_cause([], HostFacts(boot_id="boot-2", boot_id_before="boot-1")) == "reboot"


def test_the_kernels_line_counts_only_for_a_pid_of_the_job() -> None:
    facts = HostFacts(boot_id="boot-1", kernel_log=("Killed process 41 (python) total-vm:9kB",))
    assert find_cause(journal(HERE), facts, 40, 41) == "out of memory"
    assert find_cause(journal(HERE), facts, 4) == "killed"


def test_a_cgroups_counter_tells_what_the_log_does_not() -> None:
    record = ExitRecord(rank=1, generation=0, pid=50, at_s=2.0, signal=9, oom=True)
    account = RankAccount()
    exited = RankExited(node=0, record=record, account=account, detected_s=3.0)
    entries = journal(HERE, exited)
    counted = [HostFacts(boot_id="boot-1", memory_kills=kills) for kills in (1, 2)]
    causes = [find_cause(entries, facts) for facts in counted]
    assert causes == ["killed", "out of memory"], "a rank's own is known, and was recovered"


def test_a_closed_terminal_is_in_the_journal() -> None:
    stop = CommandReceived(id="x", kind="stop", who="SIGHUP", at_s=3.0)
    ended = JobEnded(status="stopped", exit_code=0, reason="stopped by SIGHUP", at_s=4.0)
    assert find_cause(journal(HERE, stop, ended), SAME) == "hang-up"


def test_what_is_left_is_a_kill_and_says_what_could_not_be_read() -> None:
    found = explain_vanishing(journal(HERE), HostFacts(boot_id="boot-1", log_readable=False))
    assert found is not None
    assert found.cause == "killed"
    assert "cannot be read" in found.reason


def test_a_controller_that_outlives_its_job_for_a_moment_hides_no_kill() -> None:
    lost = CommandReceived(id="x", kind="kill", who=RUN_LOST, at_s=3.0)
    ended = JobEnded(status="stopped", exit_code=1, reason=f"killed by {RUN_LOST}", at_s=4.0)
    entries = journal(HERE, lost, ended)
    assert find_cause(entries, SAME) == "killed"
    facts = HostFacts(boot_id="boot-1", kernel_log=("Killed process 41 (python) total-vm:9kB",))
    assert find_cause(entries, facts, 41) == "out of memory"
    assert judge_outcome(entries, Signs(now_s=9.0, alive=False), 60.0).state == "dead"


def test_a_job_that_ended_has_not_vanished() -> None:
    ended = JobEnded(status="done", exit_code=0, reason="all well", at_s=4.0)
    assert find_cause(journal(HERE, ended), SAME) is None


def test_the_word_of_slurm_goes_before_what_this_machine_shows() -> None:
    end = Outcome(state="out of memory", reason="OUT_OF_MEMORY in 12.batch", nodes="n3")
    facts = HostFacts(boot_id="another", slurm=end, elsewhere="n3")
    found = explain_vanishing(journal(HERE), facts)
    assert found is not None
    assert (found.cause, found.evidence["nodes"]) == ("out of memory", "n3")


def test_the_kernel_of_another_machine_says_nothing() -> None:
    facts = HostFacts(boot_id="another", elsewhere="n3", kernel_log=("Killed process 41",))
    assert find_cause(journal(HERE), facts, 41) == "unknown"
    put_back = Outcome(state="waiting", reason="BeginTime")
    found = explain_vanishing(journal(HERE), HostFacts(boot_id="x", elsewhere="n", slurm=put_back))
    assert found is not None
    assert "BeginTime" in found.reason


def test_a_machine_that_was_renamed_is_asked_all_the_same() -> None:
    """By its DHCP server, or by cloud-init: it has not been started anew."""
    log = ("Killed process 41 (python) total-vm:9kB",)
    facts = HostFacts(boot_id="boot-1", elsewhere="before", kernel_log=log)
    assert find_cause(journal(HERE), facts, 41) == "out of memory"


def test_a_node_that_joined_from_another_machine_is_no_reboot_of_this_one() -> None:
    joined = NodeRegistered(node=1, incarnation="b", host="i", boot_id="boot-9", slots=1)
    assert find_cause(journal(HERE, joined), SAME) == "killed"
