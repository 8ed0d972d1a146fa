"""The gate, by the person's means: what exists only on the box is not destroyed unseen (P1, P6).

The box is folders of this machine, reached through the same code as one over ssh; the real sshd is
in tests/platforms/test_gate_ssh.py.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.gate_site import Site, make_site, write_tensors
from tests.waiting import PATIENCE_S

from perdure.cli.platforms import teardown as command
from perdure.launch import transfer
from perdure.launch.catalog import load_profile
from perdure.launch.channel import Channel
from perdure.launch.records import write_record
from perdure.launch.results import gone
from perdure.launch.results.pulling import list_areas
from perdure.launch.ssh import box as box_program
from perdure.launch.ssh.render import fill
from perdure.model.platforms.launching import LaunchRecord

pytestmark = pytest.mark.skipif(not shutil.which("rsync"), reason="no rsync")


@pytest.fixture
def site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Site:
    return make_site(tmp_path, monkeypatch, capsys)


def test_weights_that_nobody_named_come_home_and_keep_the_gate_shut_until_then(site: Site) -> None:
    """P1: an unmodified script writes checkpoints/best.* into its own project."""
    site.pull()
    best = site.job / "project" / "checkpoints" / "best.safetensors"
    write_tensors(best)
    site.verify("--nothing-to-keep")
    refused = site.teardown(code=4)
    assert "project/checkpoints/best.safetensors" in refused
    assert not site.stopped.exists()

    assert "project/checkpoints: 1 files" in site.pull()
    here = site.pulled / "project" / "checkpoints" / "best.safetensors"
    assert here.read_bytes() == best.read_bytes()
    assert not (site.pulled / "project" / "train.py").exists(), "it is here as it was sent"
    assert "1 tensors" in site.verify()
    site.teardown()
    assert site.stopped.exists()


def test_a_pull_without_a_tensor_is_no_proof_but_by_a_persons_word(site: Site) -> None:
    """P1: `verify` said "ok", of 0 files with tensors, and `teardown` believed it."""
    site.pull()
    assert "no file that was pulled has a tensor in it" in site.verify(code=3)
    assert "was not verified" in site.teardown(code=4)
    assert not site.stopped.exists()
    site.verify("--nothing-to-keep")
    site.teardown()
    assert site.stopped.exists()


def test_what_a_person_leaves_is_named_and_written_down(site: Site) -> None:
    """P1: a flag names what may go, and the record says so afterwards."""
    write_tensors(site.job / "project" / "best.safetensors")
    (site.box / "sets").mkdir()
    (site.box / "sets" / "a.bin").write_bytes(b"1" * 1000)
    (site.box / "core.17").write_bytes(b"2" * 1000)
    site.pull("--leave", "data/sets")
    site.verify()
    assert (site.pulled / "data" / "core.17").exists()
    assert not (site.pulled / "data" / "sets").exists()
    site.teardown()
    (note,) = site.read_record().notes
    assert "--leave data/sets: 1 files: data/sets/a.bin" in note

    site.stopped.unlink()
    write_record(str(site.home), site.record)
    (site.box / "core.18").write_bytes(b"3")
    refused = site.run("teardown", "gpt", "--confirm", "gpt", "--nothing-to-keep")
    assert "torn down" in refused
    assert "--nothing-to-keep" in site.read_record().notes[-1]


def test_a_script_that_was_changed_on_the_box_or_here_is_brought(site: Site) -> None:
    """P6: the same size is not the same file."""
    script = site.job / "project" / "train.py"
    script.write_text("print('trainee')\n")
    assert script.stat().st_size == (site.project / "train.py").stat().st_size
    site.pull()
    assert (site.pulled / "project" / "train.py").read_text() == script.read_text()
    site.verify("--nothing-to-keep")
    changed = site.pulled / "project" / "train.py"
    changed.write_text("print('trained')\n")
    assert "does not match its SHA-256" in site.teardown(code=4)
    assert not site.stopped.exists()


def test_what_is_excluded_is_shown_and_much_is_asked_about(site: Site) -> None:
    """P1: sizes are shown before bytes move, and so is what is not looked into."""
    write_tensors(site.job / "project" / "best.safetensors")
    (site.job / "project" / "__pycache__").mkdir()
    (site.job / "project" / "__pycache__" / "x.pyc").write_bytes(b"1")
    venv = site.box / "my-env"
    venv.mkdir()
    (venv / "pyvenv.cfg").write_text("")
    (venv / "huge.so").write_bytes(b"1" * 5000)
    (site.box / "sets").mkdir()
    (site.box / "sets" / "a.bin").write_bytes(b"1" * 5000)
    said = site.run("pull", "gpt", str(site.pulled), "--up-to", "0.000004", code=4)
    assert "were not named as results" in said
    assert "data/sets: 1 files, 0.0 MB" in said
    assert f"{venv}" in said
    assert not site.pulled.exists()
    site.pull("--up-to", "0.000004", "--yes")
    assert (site.pulled / "data" / "sets" / "a.bin").exists()
    assert not (site.pulled / "data" / "my-env").exists()
    site.verify()
    site.teardown()


@pytest.mark.parametrize("kind", ["written", "relaunched"])
def test_the_gate_is_looked_at_again_once_the_name_was_typed(
    site: Site, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """P1: a person takes their time; meanwhile something is written, or the job is started."""
    write_tensors(site.job / "project" / "best.safetensors")
    site.pull()
    site.verify()
    locks: list[int | None] = []

    def think(question: str) -> str:
        if kind == "written":
            best = site.job / "project" / "best.safetensors"
            write_tensors(best, b"\1")
            os.utime(best, (1, 1))  # Its size is the same, and its time says nothing.
        else:
            locks.append(box_program.take_lock(str(site.job / "launch" / "supervise.lock")))
        return "gpt"

    monkeypatch.setattr(command, "is_terminal", lambda: True)
    monkeypatch.setattr("builtins.input", think)
    refused = site.run("teardown", "gpt", code=4)
    word = "project/best.safetensors" if kind == "written" else "has been started again"
    assert word in refused
    assert not site.stopped.exists()
    for lock in locks:
        assert lock is not None
        os.close(lock)


def test_nothing_starts_on_the_box_while_it_is_given_back(site: Site) -> None:
    """P1: the stop command runs under the box's lock; a start meanwhile is refused."""
    tried = site.folder / "tried"
    start = f"{sys.executable} {box_program.__file__} supervise {site.job}/launch"
    (site.job / "launch" / "settings.json").write_text(json.dumps({"command": ["true"]}))
    stop = msgspec.structs.replace(
        site.record.profile.teardown,
        stop_command=("sh", "-c", f"{start} 2> {tried}; echo $? >> {tried}; touch {site.stopped}"),
    )
    site.set_profile(teardown=stop)
    write_tensors(site.job / "project" / "best.safetensors")
    site.pull()
    site.verify()
    site.teardown()
    assert tried.read_text() == "box: this job runs already\n4\n"


def test_a_link_that_leads_elsewhere_and_a_folder_that_cannot_be_read_keep_it_shut(
    site: Site,
) -> None:
    """P1: what could not be looked at is not taken for nothing."""
    write_tensors(site.job / "project" / "best.safetensors")
    outside = site.folder / "big-disk"
    write_tensors(outside / "last.safetensors")
    (site.job / "project" / "out").symlink_to(outside)
    (site.job / "project" / "latest").symlink_to("best.safetensors")
    (site.job / "project" / "nowhere").symlink_to("not-there")
    bad = os.fsencode(site.job / "project") + b"/w\xff.pt"
    Path(os.fsdecode(bad)).write_bytes(b"1")
    said = site.pull()
    assert f"project/out: a link to {outside}" in said
    site.verify()
    refused = site.teardown(code=4)
    assert "project/out: a link" in refused
    assert "its name is no UTF-8" in refused
    assert "latest" not in refused
    site.teardown("--leave", "project/out", "--leave", "project/w*", "--dry-run")


@pytest.mark.parametrize(
    ("name", "host", "areas"),
    [
        ("generic-ssh", "box", {"project": "/d/gpt/project", "data": "/d", "durable": "/v",
                                 "elsewhere": "/"}),
        ("slurm", "login", {"project": "/d/gpt/project", "folder": "/d/gpt"}),
        ("slurm", "", {}),
        ("kubernetes", "",
         {"project": "/d/gpt/project", "folder": "/d/gpt", "durable": "/checkpoints"}),
        ("kaggle", "", {"output": "/v/state"}),
        ("local", "", {}),
    ],
)  # fmt: skip
def test_every_platform_is_looked_at_by_the_same_means(
    name: str, host: str, areas: dict[str, str]
) -> None:
    """P1: what a platform's job may have written is looked at, wherever it is."""
    profile = load_profile(name, "/nonexistent").profile
    launch = msgspec.structs.replace(profile.launch, host=host)
    record = LaunchRecord(
        job="gpt", profile=msgspec.structs.replace(profile, launch=launch), place="/d/gpt",
        home="/v/state", python="python3",
    )  # fmt: skip
    assert list_areas(record) == areas


def test_a_job_that_was_not_launched_from_here_keeps_the_gate_shut(site: Site) -> None:
    """P6: a colleague's job on the same box is named, and its files are not brought along."""
    write_tensors(site.job / "project" / "best.safetensors")
    theirs = site.box / "bert"
    (theirs / "launch").mkdir(parents=True)
    (theirs / "launch" / "settings.json").write_text("{}")
    (theirs / "launch" / "box.py").write_text("")
    write_tensors(theirs / "project" / "theirs.safetensors")
    state = site.box / "state" / "jobs" / "t5"
    state.mkdir(parents=True)
    for name in ("job.json", "journal.jsonl"):
        (state / name).write_text("{}")
    launch = msgspec.structs.replace(site.record.profile.launch, host="another-box")
    profile = msgspec.structs.replace(site.record.profile, launch=launch)
    namesake = msgspec.structs.replace(site.record, job="bert", profile=profile)
    write_record(str(site.home), namesake)  # One of ours elsewhere is not theirs here.
    site.pull()
    assert not (site.pulled / "data" / "bert").exists()
    site.verify()
    refused = site.teardown(code=4)
    assert "job `bert` is on the box, and was not launched from here" in refused
    assert not site.stopped.exists()
    site.teardown("--others-agree")
    assert site.stopped.exists()
    assert site.read_record().notes[-1].endswith("teardown --others-agree")


def lose_box(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the box be one that no ssh reaches."""
    (site.folder / "bin" / "ssh").write_text("#!/bin/sh\necho no route to host >&2\nexit 255\n")
    (site.folder / "bin" / "ssh").chmod(0o755)
    monkeypatch.setattr("perdure.launch.channel.ATTEMPTS", 1)
    launch = msgspec.structs.replace(site.record.profile.launch, host="gpu-box")
    site.set_profile(launch=launch)


def test_a_box_that_is_gone_with_nothing_pulled_can_be_forgotten(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P6: `--box-is-gone` with nothing pulled refused for ever, and the name was taken for ever."""
    refused = site.run("teardown", "--forget", "gpt", "--yes", code=4)
    assert "answers, and says ended" in refused
    lose_box(site, monkeypatch)
    refused = site.teardown("--box-is-gone", code=4)
    assert "perdure teardown gpt --forget" in refused
    refused = site.run("teardown", "--forget", "gpt", code=4)
    assert "nothing of it was ever brought home" in refused
    assert "this stops no meter" in refused
    site.stopped.touch()
    assert "would be forgotten" in site.run("teardown", "--forget", "gpt", "--yes", "--dry-run")
    told = json.loads(site.run("teardown", "--forget", "gpt", "--yes", "--json").splitlines()[0])
    assert Path(told["record"]).exists()
    assert "unknown job" in site.run("status", "gpt", code=2)
    assert "was not launched from here" in site.run("teardown", "--forget", "gpt", "--yes", code=2)


def test_what_was_written_after_the_pull_is_said_to_be_lost(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P6: forgetting says what there is at home."""
    write_tensors(site.job / "project" / "best.safetensors")
    site.pull()
    lose_box(site, monkeypatch)
    said = site.run("teardown", "--forget", "gpt", "--yes", "--box-is-gone")
    assert "whatever was written after the pull of" in said
    assert "never verified" in said


def test_a_process_with_torch_that_is_not_the_jobs_is_named(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P6: a colleague trains on the same box; an ssh that is played runs there what it is given."""
    ssh = site.folder / "bin" / "ssh"
    ssh.write_text(
        "#!/bin/sh\n"
        'while [ "$1" != gpu-box ]; do shift; [ $# -gt 0 ] || exit 0; done; shift\n'
        'exec sh -c "$*"\n'
    )
    ssh.chmod(0o755)
    site.set_profile(launch=msgspec.structs.replace(site.record.profile.launch, host="gpu-box"))
    library = site.folder / "libtorch_cpu.so"
    library.write_bytes(b"\0" * 4096)
    code = "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); "
    code += "print('mapped', flush=True); sys.stdin.read()"
    theirs = subprocess.Popen(
        [sys.executable, "-c", code, str(library)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert theirs.stdout is not None
        assert theirs.stdout.readline() == b"mapped\n"
        write_tensors(site.job / "project" / "best.safetensors")
        site.pull()
        site.verify()
        refused = site.teardown(code=4)
        assert f"gpu-box: process {theirs.pid} of " in refused
        assert "has torch in its memory" in refused
        assert not site.stopped.exists()
    finally:
        theirs.communicate()
    site.teardown("--others-agree")
    assert site.stopped.exists()


CRONTAB = """#!/bin/sh
# Plays crontab, of which the file `table` is what there is.
cd "$(dirname "$0")"
case "$1" in
  -l)
    [ ! -e broken ] || { echo "crontab: can't open spool: Permission denied" >&2; exit 1; }
    [ -e table ] || { echo "no crontab for person" >&2; exit 1; }
    cat table ;;
  -) cat > table ;;
esac
"""


def run_cron(folder: Path, *args: str) -> "subprocess.CompletedProcess[str]":
    env = dict(os.environ, PATH=f"{folder}:{os.environ['PATH']}")
    command = ["sh", str(folder / "launch" / "relaunch.sh"), *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S)


def test_a_crontab_that_cannot_be_read_is_left_as_it_is(tmp_path: Path) -> None:
    """P6: `crontab -l` that failed was taken for an empty one, and the user's lines were lost."""
    launch = tmp_path / "launch"
    launch.mkdir()
    (launch / "env.sh").write_text(f"JOB_DIR={tmp_path}\n")
    (launch / "relaunch.sh").write_text(fill("cron.sh", job="gpt"))
    (tmp_path / "crontab").write_text(CRONTAB)
    (tmp_path / "crontab").chmod(0o755)
    table = tmp_path / "table"
    assert run_cron(tmp_path).returncode == 0, "there was none"
    assert table.read_text().count("\n") == 1
    table.write_text("17 3 * * * backup\n")
    (tmp_path / "broken").touch()
    done = run_cron(tmp_path)
    assert done.returncode == 1
    assert "nothing was changed: crontab: can't open spool: Permission denied" in done.stderr
    assert table.read_text() == "17 3 * * * backup\n"
    (tmp_path / "broken").unlink()
    assert run_cron(tmp_path).returncode == 0
    assert run_cron(tmp_path).returncode == 0
    lines = table.read_text().splitlines()
    assert lines[0] == "17 3 * * * backup"
    assert len(lines) == 2
    assert run_cron(tmp_path, "off").returncode == 0
    assert table.read_text() == "17 3 * * * backup\n"


def test_launches_at_once_make_an_environment_one_after_the_other(tmp_path: Path) -> None:
    """P6: two launches shared an environment's folder without a lock."""
    launch, base = tmp_path / "launch", tmp_path / "python3"
    launch.mkdir()
    (launch / "env.sh").write_text(f"JOB_DIR={tmp_path}; DATA_DIR={tmp_path}\n")
    # It makes no environment, and says when it begins and ends.
    base.write_text(f"""#!/bin/sh
if [ "$2" = venv ]; then
  echo begin >> {tmp_path}/log; sleep 0.6; echo end >> {tmp_path}/log
  mkdir -p "$4/bin"; ln -sf {base} "$4/bin/python"; exit 0
fi
[ "$1" = - ] && exec {sys.executable} "$@"
[ "$1" = -c ] && echo {tmp_path}
exit 0
""")
    base.chmod(0o755)

    def make(wait: str) -> "subprocess.Popen[str]":
        script = fill(
            "setup.sh", digest="d", mode="create", python=str(base), wishes="", plain="yes",
            lists="/dev/null", name="e", wheel="w.whl", native=":", wait=wait,
        )  # fmt: skip
        path = launch / f"setup-{wait}.sh"
        path.write_text(script)
        return subprocess.Popen(["sh", str(path)], stderr=subprocess.PIPE,
                                stdout=subprocess.DEVNULL, text=True)  # fmt: skip

    both = [make("300"), make("300.0")]
    for each in both:
        assert each.communicate(timeout=PATIENCE_S)[1] == ""
        assert each.returncode == 0
    log = (tmp_path / "log").read_text().split()
    assert log == ["begin", "end"], "the second one finds it made"
    lock = box_program.take_lock(str(tmp_path / "envs" / ".perdure-e.lock"))
    late = make("0.3")
    assert "for 0.3 s another launch has been making" in late.communicate(timeout=PATIENCE_S)[1]
    assert late.returncode == 1
    assert lock is not None
    os.close(lock)


def test_weights_outside_of_every_folder_of_the_platform_are_found(site: Site) -> None:
    """P1: `--out=/mnt/runs`, `OUT=~/ckpt`: what the job wrote there is not destroyed unseen."""
    named, home = site.folder / "mnt" / "runs", site.folder / "box-home"
    write_tensors(named / "best.safetensors")
    write_tensors(home / "ckpt" / "last.safetensors", b"\1")
    write_tensors(home / ".cache" / "huggingface" / "base.safetensors")
    spec = {"args": [f"--out={named}"], "env": {"PATH": "/usr/bin:/bin"}}
    (site.job / "launch" / "job.json").write_text(json.dumps(spec))
    site.pull()
    assert "2 tensors" in site.verify()
    below = site.pulled / "elsewhere" / str(site.folder)[1:]
    assert (below / "mnt" / "runs" / "best.safetensors").exists()
    assert (below / "box-home" / "ckpt" / "last.safetensors").exists()
    assert not (below / "box-home" / ".cache").exists()
    write_tensors(named / "later.safetensors")
    refused = site.teardown(code=4)
    assert "mnt/runs/later.safetensors on the box is not what was pulled" in refused
    assert not site.stopped.exists()
    site.pull()
    site.verify()
    site.teardown()
    assert site.stopped.exists()


def test_what_lay_in_a_home_before_the_launch_is_none_of_the_jobs(site: Site) -> None:
    """P1: a home holds a person's own files as well."""
    home = site.folder / "box-home"
    write_tensors(home / "mine.safetensors")
    target = site.folder / "disk"
    target.mkdir()
    (home / "ckpt").symlink_to(target)
    record = msgspec.structs.replace(site.record, launched_s=time.time() + 7200.0)
    write_record(str(site.home), record)
    for sent in (site.job / "launch").iterdir():
        sent.chmod(0o600)  # The files of the launch are as new, by the box's own clock.
    site.pull()
    assert not (site.pulled / "elsewhere").exists()
    write_record(str(site.home), site.record)
    write_tensors(target / "new.safetensors")
    assert "a link to" in site.pull()
    assert (site.pulled / "elsewhere").exists()


def test_a_link_into_a_folder_that_is_left_out_is_no_copy(site: Site) -> None:
    """P1: checkpoints that a link of the project leads into a cache stay on the box: say so."""
    hidden = site.box / ".cache" / "ckpt"
    write_tensors(hidden / "best.safetensors")
    write_tensors(site.job / "project" / "other.safetensors")
    (site.job / "project" / "checkpoints").symlink_to(hidden)
    assert "cannot be brought: project/checkpoints: a link to" in site.pull()
    site.verify()
    assert "project/checkpoints: a link to" in site.teardown(code=4)
    assert not site.stopped.exists()


def test_names_that_rsync_takes_for_comments_come_home(site: Site) -> None:
    """P1: rsync leaves out listed names with `#` or `;` in front, and says nothing of it."""
    for name in ("#best", ";best", "-best", " best", "be\nst", "\x1b]52;c;x\x07"):
        write_tensors(site.job / "project" / f"{name}.safetensors", name[:1].encode())
        write_tensors(site.job / "project" / name / "deep.safetensors", name[:1].encode())
    site.pull()
    assert "12 tensors" in site.verify()
    site.teardown()


def test_thousands_of_folders_are_brought_in_few_transfers(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1: one folder a step must not cost one connection a step."""
    for number in range(100):
        write_tensors(site.job / "project" / f"step-{number}" / "a.safetensors")
    brought: list[int] = []
    real = transfer.pull

    def count(channel: Channel, source: str, target: Path, names: list[str], **more: Any) -> None:
        brought.append(len(names))
        real(channel, source, target, names, **more)

    monkeypatch.setattr(transfer, "pull", count)
    site.pull()
    assert max(brought) == 100
    assert len(brought) < 10
    assert "100 tensors" in site.verify()


def test_a_box_that_answers_with_a_failure_is_not_forgotten(site: Site) -> None:
    """P6: a full disk or a broken Python is no box that is gone."""
    (site.job / "launch" / "box.py").write_text("raise SystemExit('no space left on device')\n")
    refused = site.run("teardown", "--forget", "gpt", "--yes", code=4)
    assert "is not known to be gone" in refused
    assert "no space left" in refused


def test_forgetting_says_that_the_platform_still_has_the_box(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P7: a box whose ssh is down may be billed on; its platform knows."""
    lose_box(site, monkeypatch)
    for yes in ((), ("--yes",)):
        refused = site.run("teardown", "--forget", "gpt", *yes, code=4)
        assert "does not say that gpu-box is gone, which may be billed on" in refused
        assert "hint: look at the provider; --box-is-gone" in refused


def test_what_lives_and_hangs_is_not_forgotten(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """P6: ssh connects, and storage there hangs: the question is not answered in time."""
    (site.job / "launch" / "box.py").write_text("import time; time.sleep(60)\n")
    monkeypatch.setattr("perdure.launch.channel.ATTEMPTS", 1)
    real = Channel.run
    monkeypatch.setattr(Channel, "run", lambda *a, **k: real(*a, **{**k, "timeout_s": 0.5}))
    refused = site.run("teardown", "--forget", "gpt", "--yes", code=4)
    assert "is not known to be gone: this machine: no answer in" in refused
    site.run("teardown", "--forget", "gpt", "--yes", "--box-is-gone")


def test_forgetting_says_what_remains_where_nobody_can_be_asked(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P6: a profile that knows no way to ask leaves it to a person, who is told."""
    lose_box(site, monkeypatch)
    site.set_profile(teardown=msgspec.structs.replace(site.record.profile.teardown,
                                                      gone_command=()))  # fmt: skip
    said = site.run("teardown", "--forget", "gpt", "--yes")
    assert f"nobody has said that gpu-box is gone: what runs there in {site.job} may go on" in said


@pytest.mark.parametrize(
    ("script", "why"),
    [("sleep 3600 | cat", "timed out"), ("yes", "says more than 1 MiB"), ("exec nothing-here", "")],
)
def test_a_question_that_hangs_or_prints_for_ever_says_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    """P7: a shell's own command held the pipe for longer than the shell lived."""
    monkeypatch.setattr(gone, "ASK_S", 0.5 if why == "timed out" else PATIENCE_S)
    asked = msgspec.structs.replace(
        site.record.profile.teardown, gone_command=("sh", "-c", script), gone_when="404|y"
    )
    site.set_profile(teardown=asked)
    answer = gone.ask_gone(site.record)
    assert answer is not None
    assert not answer.gone
    assert why in answer.said


def test_what_a_killed_pull_or_verify_has_left_is_no_damage(site: Site) -> None:
    site.pulled.mkdir()
    (site.pulled / ".PULL_MANIFEST.json.4711-139736419183488").write_text('{"job')
    site.pull()
    (site.pulled / ".PULL_VERIFIED.json.4711-140523197422464").write_text('{"pulled')
    assert "4711" not in site.verify("--nothing-to-keep")
    (site.pulled / "PULL_VERIFIED.json.mine").write_text("mine")
    assert "is not in the roster" in site.run("verify", str(site.pulled), code=3)
