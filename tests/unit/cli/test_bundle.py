"""`perdure bundle`: everything that a bug report needs, and nothing that is secret."""

import base64
import getpass
import gzip
import io
import json
import os
import socket
import tarfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tests.journals import render_journal

from perdure.cli.app import run_command
from perdure.cli.looking import bundle
from perdure.cli.looking.redaction import Redactor
from perdure.model.codec import encode
from perdure.model.events import JobSubmitted, JournalEntry, NodeRegistered, RankExited
from perdure.model.failures import ExitRecord
from perdure.model.job import AlertsConfig, JobSpec
from perdure.model.signals.progress import RankAccount
from perdure.service.jobfiles import Parts

SECRETS = {
    "env": "correct horse battery staple",
    "env in quotes": 'he said "open sesame" twice',
    "env in lines": "first line of a key\nMIIEvQIBADANBgkqhkiG9w0BAQEF\nlast line of it",
    "short env": "4711",
    "process": "process-wide-secret-value",
    "option": "tok3n-of-an-option",
    "hydra": "value-of-hydra",
    "endpoint": "endpoint-token-Zx81",
    "credential": "password-of-agent-0",
    "webhook": "https://hooks.example.com/services/T000/B000/XXXXYYYYZZZZ",
    "userinfo": "s3cr3tpassw0rd",
    "query": "c2lnbmF0dXJlLW9mLWEtdXJs",
    "assignment": "hunter2hunter2",
    "quoted": "two words in quotes",
    "json": "in-a-json-document",
    "bearer": "abcdef0123456789.bearer",
    "aws": "AKIAIOSFODNN7EXAMPLE",
    "github": "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
    "hugging face": "hf_abcdefghijklmnopqrstuvwxyzABCDEF",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N",
    "hex": "0123456789abcdef0123456789abcdef01234567",
    "nkey": "SUAM" + "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567ABCDEFGHIJKLMNOPQRSTUV",
    "random": "Zm9vYmFyYmF6cXV4Y29ycEdyYXVsdDE3",
    "pem": "MIIEpAIBAAKCAQEA0Z3VS5JJcds3xfn",
}
PEOPLE = ("alice.example", "jdoe", "gpu-box-17", "gpu-box-17.corp.example.com", "10.20.30.40",
          "fileserver.corp.example.com", "build@lab.example.org", "fd12:3456::7",
          "02:42:ac:11:00:02")  # fmt: skip


def log_lines() -> list[str]:
    s = SECRETS
    return [
        f"connecting to https://jdoe:{s['userinfo']}@fileserver.corp.example.com/data",
        f"GET https://fileserver.corp.example.com/x?X-Amz-Signature={s['query']}&n=1",
        f"export DB_PASSWORD={s['assignment']}",
        f"password: '{s['quoted']}', next",
        json.dumps({"api_key": s["json"], "n": 1}),
        f"\x1b[32mAuthorization\x1b[0m: Bearer {s['bearer']}",
        f"found {s['aws']} and {s['github']}, {s['hugging face']} {s['jwt']}; {s['nkey']}",
        f"wandb: {s['hex']}; got {s['random']} back",
        f"-----BEGIN RSA PRIVATE KEY-----\n{s['pem']}\n-----END RSA PRIVATE KEY-----",
        f"as it is: {s['env']} and {s['process']} and {s['env in quotes']}",
        f"encoded: {base64.b64encode(s['env'].encode()).decode()} {quote(s['env'])}",
        f"written down: {json.dumps(s['env in quotes'])} {s['env in quotes']!r}",
        f"token of the server: {s['endpoint']}, of the agent: {s['credential']}",
        f"started with --api-token {s['option']} and model.api_key={s['hydra']}",
        f"alert to {s['webhook']} failed",
        "File /home/alice.example/project/train.py on gpu-box-17.corp.example.com",
        "peer gpu-box-17 at 10.20.30.40:29500, and 127.0.0.1; mail to build@lab.example.org",
        "via fd12:3456::7 and card 02:42:ac:11:00:02 at 19:41:53; std::vector, c10d::abort",
        "ValueError: an ordinary message, step 120, loss 2.31",
    ]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("MY_SERVICE_TOKEN", SECRETS["process"])
    monkeypatch.chdir(tmp_path)
    spec = JobSpec(
        name="job",
        script="train.py",
        args=("--api-token", SECRETS["option"], f"model.api_key={SECRETS['hydra']}", "--lr", "1"),
        env={
            "MOTTO": SECRETS["env"],
            "QUOTED": SECRETS["env in quotes"],
            "LINES": SECRETS["env in lines"],
            "PIN": SECRETS["short env"],
            "NCCL_DEBUG": "INFO",
        },
        alerts=AlertsConfig(webhook=SECRETS["webhook"]),
    )
    folder = tmp_path / "state" / "jobs" / "job"
    (folder / "credentials").mkdir(parents=True)
    (folder / "logs" / "ranks" / "g0").mkdir(parents=True)
    (folder / "errors").mkdir()
    (folder / "job.json").write_bytes(encode(spec))
    endpoint = {"url": "nats://127.0.0.1:1", "token": SECRETS["endpoint"], "clock_offset_s": 0}
    (folder / "endpoint.json").write_text(json.dumps(endpoint))
    login = {"user": "agent-0", "password": SECRETS["credential"]}
    (folder / "credentials" / "agent-0.json").write_text(json.dumps(login))
    text = "\n".join(log_lines()) + "\n"
    (folder / "logs" / "ranks" / "g0" / "rank-0.out").write_text(text)
    (folder / "logs" / "agent-0.log").write_text(text)
    record = ExitRecord(
        rank=0, generation=0, pid=7, at_s=101.0, code=1, error=log_lines()[2],
        traceback="\n".join(log_lines()), last_output=tuple(log_lines()),
    )  # fmt: skip
    exited = RankExited(node=0, record=record, account=RankAccount(), detected_s=101.1)
    place = "gpu-box-17.corp.example.com"
    here = NodeRegistered(node=0, incarnation="a", host=place, boot_id="b", slots=1)
    entries = [
        JournalEntry(seq=1, at_s=100.0, body=JobSubmitted(spec=spec, at_s=100.0)),
        JournalEntry(seq=2, at_s=100.1, body=here),
        JournalEntry(seq=3, at_s=101.1, body=exited),
    ]
    (folder / "journal.jsonl").write_bytes(render_journal(entries))
    (folder / "errors" / "g0-r0.json").write_text(json.dumps({"message": log_lines()}))
    return folder


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask no other command, each of which takes a second."""
    monkeypatch.setattr(bundle, "ask_commands", lambda job: {})


def read_archive(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        return {
            member.name: (archive.extractfile(member) or io.BytesIO()).read()
            for member in archive.getmembers()
        }


def check_clean(path: Path) -> None:
    """No secret, in whole or by line, nobody and no place is in the archive's plain bytes."""
    data = gzip.decompress(path.read_bytes())
    for kind, secret in SECRETS.items():
        for line in (secret, *secret.split("\n")):
            for way in (line, json.dumps(line)[1:-1], quote(line)):
                assert way.encode() not in data, f"{kind}: {way}"
    assert base64.b64encode(SECRETS["env"].encode()) not in data
    for name in (*PEOPLE, socket.gethostname(), str(Path.home()), os.environ["PERDURE_HOME"]):
        if len(name) > 2 and name not in ("/root", "localhost"):
            assert name.lower().encode() not in data.lower(), name
    if getpass.getuser() != "root":
        assert getpass.getuser().encode() not in data


def test_nothing_secret_is_in_it_and_everything_else_is(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["bundle", "job", "--yes"]) == 0
    shown = capsys.readouterr().out
    path = tmp_path / "job-bundle.tar.gz"
    check_clean(path)
    assert all(secret not in shown for secret in SECRETS.values())
    files = read_archive(path)
    names = {name.removeprefix("job-bundle/") for name in files}
    assert names >= {
        "job.json", "journal.jsonl", "logs/agent-0.log",
        "errors/g0-r0.json", "versions.json", "status.json", "report.json", "diagnose.json",
        "doctor.json", "doctor-job.json",
    }  # fmt: skip
    left_out = ("credentials", "endpoint", "logs/ranks")
    assert not any(part in name for part in left_out for name in names)
    log = files["job-bundle/logs/agent-0.log"].decode()
    assert "ValueError: an ordinary message, step 120, loss 2.31" in log
    assert "127.0.0.1" in log
    assert "at 19:41:53; std::vector, c10d::abort" in log
    job = json.loads(files["job-bundle/job.json"])
    assert set(job["env"].values()) == {"<env>"}
    assert job["args"][-2:] == ["--lr", "1"]
    assert json.loads(files["job-bundle/versions.json"])["packages"]["perdure"]
    assert json.loads(files["job-bundle/report.json"])
    assert json.loads(files["job-bundle/diagnose.json"])["verdicts"] is not None
    for line in files["job-bundle/journal.jsonl"].decode().splitlines():
        json.loads(line)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_name_has_the_same_pseudonym_everywhere(home: Path, tmp_path: Path, quick: None) -> None:
    (home / "logs" / "agent-0.log").write_text("zork is silent\npeer zork came, zork\n")
    assert run_command(["bundle", "job", "--yes", "--out", "b.tar.gz"]) == 0
    log = read_archive(tmp_path / "b.tar.gz")["job-bundle/logs/agent-0.log"].decode()
    name = log.split()[0]
    assert log == f"{name} is silent\npeer {name} came, {name}\n"
    assert name not in ("zork", "")


def test_what_a_script_said_is_not_in_it(home: Path, tmp_path: Path, quick: None) -> None:
    """Not even in words that perdure has itself. Where it failed, and by which error, is in it."""
    text = (
        'Traceback (most recent call last):\n  File "/home/jdoe/train.py", line 30, in main\n'
        "    raise ValueError(rank)\nValueError: the step of a rank is open sesame"
    )
    record = ExitRecord(
        rank=0, generation=0, pid=7, at_s=101.0, code=1, error="ValueError: open sesame",
        traceback=text, last_output=("open sesame",),
    )  # fmt: skip
    exited = RankExited(node=0, record=record, account=RankAccount(), detected_s=101.1)
    entry = encode(JournalEntry(seq=1, at_s=101.1, body=exited))
    (home / "journal.jsonl").write_bytes(entry + b"\n")
    assert run_command(["bundle", "job", "--yes", "--out", "b.tar.gz"]) == 0
    (line,) = read_archive(tmp_path / "b.tar.gz")["job-bundle/journal.jsonl"].splitlines()
    kept = json.loads(line)["body"]["record"]
    assert kept["error"] == "ValueError"
    assert 'train.py", line 30, in main\nValueError' in kept["traceback"]
    assert b"sesame" not in line
    assert b"open" not in line


def test_it_is_shown_first_and_overwrites_nothing(
    home: Path, tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "b.tar.gz"
    assert run_command(["bundle", "job", "--out", str(out)]) == 4  # Nobody can be asked.
    assert "journal.jsonl" in capsys.readouterr().out
    assert run_command(["bundle", "job", "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert not told["written"]
    assert told["redacted"]["word"] > 0
    assert not out.exists()
    out.write_text("mine")
    assert run_command(["bundle", "job", "--out", str(out), "--yes"]) == 2
    assert out.read_text() == "mine"
    assert run_command(["bundle", "job", "--out", str(tmp_path / "no" / "b"), "--yes"]) == 3
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_broken_job_has_a_bundle_too(home: Path, tmp_path: Path, quick: None) -> None:
    (home / "journal.jsonl").write_bytes(b"\xff\x00 no entry\n" * 10 + b'{"seq":1,"torn')
    (home / "job.json").write_text(f'{{"env": {{"MOTTO": "{SECRETS["env"]}')
    (home / "state.json").write_bytes(os.urandom(1000))
    assert run_command(["bundle", "job", "--yes", "--out", "b.tar.gz"]) == 0
    files = read_archive(tmp_path / "b.tar.gz")
    assert b"no entry" in files["job-bundle/journal.jsonl"]
    assert "job-bundle/job.json" not in files


def test_what_a_job_file_that_is_no_text_has_kept_secret_is_in_no_other_file(
    home: Path, tmp_path: Path, quick: None
) -> None:
    (home / "job.json").write_bytes(b'{"name": "gr\xfcn", "env": {"MOTTO": "kept-to-myself"}}')
    (home / "journal.jsonl").write_text('{"said": "kept-to-myself"}\n')
    assert run_command(["bundle", "job", "--yes", "--out", "b.tar.gz"]) == 0
    assert b"kept-to-myself" not in b"".join(read_archive(tmp_path / "b.tar.gz").values())


@pytest.mark.long
def test_a_journal_that_is_broken_is_said_to_be_by_what_was_asked(
    home: Path, tmp_path: Path
) -> None:
    (home / "journal.jsonl").write_bytes(b"gpu-box-17 no entry\n" * 10)
    (home / "parts.json").write_bytes(encode(Parts(started_s=1.0, run=1, host="gpu-box-17")))
    assert run_command(["bundle", "job", "--yes", "--out", "b.tar.gz"]) == 0
    check_clean(tmp_path / "b.tar.gz")
    report = read_archive(tmp_path / "b.tar.gz")["job-bundle/report.json"]
    assert json.loads(report)


def test_long_logs_are_cut_between_lines(
    home: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "FILE_HEAD_BYTES", 1000)
    monkeypatch.setattr(bundle, "FILE_TAIL_BYTES", 1000)
    lines = "".join(f"{n} DB_PASSWORD={SECRETS['assignment']}\n" for n in range(1000))
    (home / "logs" / "agent-0.log").write_text(lines)
    (home / "logs" / "agent-1.log").write_text("x" * 10_000_000)
    assert run_command(["bundle", "job", "--yes", "--out", "b.tar.gz"]) == 0
    check_clean(tmp_path / "b.tar.gz")
    files = read_archive(tmp_path / "b.tar.gz")
    text = files["job-bundle/logs/agent-0.log"].decode()
    assert len(text) < 2500
    assert text.startswith("0 ")
    assert "bytes are left out here" in text
    assert text.endswith("= <secret>\n")
    assert len(files["job-bundle/logs/agent-1.log"]) < 100


def test_an_unknown_job_has_none(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["bundle", "jov"]) == 2
    assert "there is job" in capsys.readouterr().err
    for name in ("../job", "..", ""):
        assert run_command(["bundle", name, "--yes"]) == 2


def test_a_link_out_of_the_folder_is_not_followed(home: Path, tmp_path: Path, quick: None) -> None:
    (tmp_path / "private.txt").write_text("not the job's")
    (home / "logs" / "linked.log").symlink_to(tmp_path / "private.txt")
    assert run_command(["bundle", "job", "--yes", "--out", "b.tar.gz"]) == 0
    files: Any = read_archive(tmp_path / "b.tar.gz")
    assert b"not the job's" not in b"".join(files.values())


MAD = (
    "1", "x", "_", "+", "-", ":", "a.", "https://", '\\"', '"env":{"a":"b",', "\ud800", "a1B",
    "token", "[", '{"a":', "/home/", "\x1b]", "--a", "?a", "token=", "a@",
)  # fmt: skip


def test_no_text_makes_it_think_for_ever() -> None:
    """Lines of a program that has gone mad are read; how fast, the gate `bundle-mad-lines` says."""
    for unit in MAD:
        Redactor().redact(unit * (100_000 // len(unit)) + "!")


def test_any_number_of_names_is_taken_out() -> None:
    text = " ".join(f"user{n}@host{n}.example.org https://h{n}.corp/x" for n in range(3000))
    left = Redactor().redact(text)
    assert "example.org" not in left
    assert "h2999.corp" not in left
    assert "user2999@" not in left
