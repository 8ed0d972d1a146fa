"""What `perdure init` writes is taken by run and launch, and nothing is written over."""

import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli.adopting import scripts
from tests.waiting import PATIENCE_S

from perdure.cli.adopting import init, jobfile
from perdure.cli.adopting.script import Reading
from perdure.cli.app import run_command
from perdure.cli.platforms.launch import make_launch_spec
from perdure.cli.running.jobspec import make_spec, read_job_file
from perdure.cli.running.options import RunOptions
from perdure.model.errors import PerdureError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    return tmp_path


def write(path: Path, text: str = scripts.STEPS) -> Path:
    path.write_bytes(text.encode())
    return path


def run_init(capsys: Any, *words: str) -> dict[str, Any]:
    assert run_command(["init", "--json", *words]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


@pytest.mark.parametrize(
    "kind", ["STEPS", "EPOCHS", "HUGGINGFACE", "LIGHTNING", "FSDP1", "PERDURE"]
)
@pytest.mark.parametrize("name", ["train.py", 'my "train" \\ (ü).py'])
def test_the_job_file_is_taken_by_run_and_launch(kind, name, folder, capsys) -> None:
    write(folder / name, getattr(scripts, kind))
    document = run_init(capsys, name, "--", "--lr", '0.1 "x"\n\x7f')
    assert document["job_file_written"]
    assert (folder / "job.toml").read_text() == document["job_file_text"]
    job_file = read_job_file("job.toml")
    assert job_file["args"] == ["--lr", '0.1 "x"\n\x7f']
    assert job_file["script"] == name
    own = {"own": ["out/checkpoint-*"]} if kind == "HUGGINGFACE" else {}
    assert job_file["checkpoint"] == own, "as often as is best, and not every ten minutes"
    spec, named, _ = make_spec(RunOptions(config="job.toml", environ={}))
    assert named
    launched = make_launch_spec("job.toml", str(folder / "home"))
    assert (
        (launched.script, launched.nproc) == (spec.script, spec.nproc) == (name, job_file["nproc"])
    )


def test_suggestions_are_taken_once_they_are_no_comments(folder, capsys) -> None:
    text = run_init(capsys, str(write(folder / "train.py")))["job_file_text"]
    bare = [line.removeprefix("# ") for line in text.splitlines() if not line.startswith("#:")]
    lines = [line for line in bare if line.startswith("[") or " = " in line]
    at = [line for line in lines if line.startswith("args")]
    assert len(at) == 1
    (folder / "all.toml").write_text("\n".join(lines))
    make_spec(RunOptions(config="all.toml", environ={}))


def test_torchft_gets_groups(folder, capsys) -> None:
    text = run_init(capsys, str(write(folder / "train.py", scripts.TORCHFT)))["job_file_text"]
    assert "[torchft]\nreplicas = 2\n" in text
    assert "[checkpoint]" not in text


def test_ranks_are_the_gpus_where_there_are_any() -> None:
    script = Reading(scripts.STEPS).describe()
    assert jobfile.suggest_nproc(script, {"CUDA_VISIBLE_DEVICES": ""})[0] == 2
    lone = Reading(scripts.EPOCHS).describe()
    assert jobfile.suggest_nproc(lone, {})[0] == 1


def test_a_job_file_is_never_written_over(folder, capsys) -> None:
    """Another's job file stays, and the script gets one of its own name, which is then said."""
    write(folder / "train.py")
    write(folder / "job.toml", "script = 'mine.py'\n")
    assert run_command(["init", "train.py"]) == 0
    told = capsys.readouterr()
    assert (folder / "job.toml").read_text() == "script = 'mine.py'\n"
    assert "job.toml is there already and is left alone" in told.err
    assert "wrote train.toml" in told.out
    assert "perdure run -c train.toml" in told.out
    with open(folder / "train.toml", "a") as file:
        file.write("# mine\n")
    before = (folder / "train.toml").read_text()
    again = run_init(capsys, "train.py")
    assert (again["job_file"], again["job_file_written"]) == ("train.toml", False)
    assert (folder / "train.toml").read_text() == before


@pytest.mark.parametrize("text", ["", "script = 3\n", "no [ toml", "\0"])
def test_what_is_no_job_file_stays_as_well(text: str, folder, capsys) -> None:
    write(folder / "train.py")
    write(folder / "job.toml", text)
    assert run_init(capsys, "train.py")["job_file"] == "train.toml"
    assert (folder / "job.toml").read_text() == text


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_apply_changes_the_script_and_keeps_it(mark, end, folder, capsys) -> None:
    before = (mark + scripts.STEPS).replace("\n", end).encode()
    path = folder / "train.py"
    path.write_bytes(before)
    path.chmod(0o754)
    document = run_init(capsys, "train.py", "--apply")
    assert Path(document["backup"]).read_bytes() == before
    assert path.read_bytes().startswith(mark.encode())
    assert b"run.steps(args.steps):" + end.encode() in path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o754
    compile(path.read_bytes(), "train.py", "exec")
    after = path.read_bytes()
    again = run_init(capsys, "train.py", "--apply")
    assert (again["diff"], again["backup"]) == ("", "")
    assert path.read_bytes() == after


def test_apply_keeps_a_link_and_an_older_backup(folder, capsys) -> None:
    (folder / "real").mkdir()
    write(folder / "real" / "train.py")
    os.symlink("real/train.py", folder / "train.py")
    write(folder / "real" / "train.py.orig", "mine")
    assert run_command(["init", "train.py", "--apply"]) == 4
    assert "train.py.orig is there already" in capsys.readouterr().err
    assert (folder / "train.py").read_text() == scripts.STEPS
    (folder / "real" / "train.py.orig").unlink()
    run_init(capsys, "train.py", "--apply")
    assert (folder / "train.py").is_symlink()
    assert "run.steps" in (folder / "real" / "train.py").read_text()


def test_a_script_that_changes_meanwhile_is_left_alone(folder) -> None:
    path = write(folder / "train.py", "import torch\n")
    with pytest.raises(PerdureError, match="changed just now"):
        init.write_script(path, b"something else", "x = 1\n")
    assert path.read_text() == "import torch\n"


def test_nothing_of_the_script_is_run(folder, capsys) -> None:
    write(folder / "train.py", "open('ran', 'w')\nraise SystemExit(3)\n" + scripts.STEPS)
    run_init(capsys, "train.py", "--apply")
    assert not (folder / "ran").exists()


DEEP = "x = " + "(" * 5000 + ")" * 5000


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b"\xff\xfe", "not UTF-8, at byte 0"),
        (b"# coding: latin-1\nx = '\xe4'", "not UTF-8"),
        (b"import (", "line 1:"),
        (b"x = 1\0", "null bytes"),
        (b"x = 1\n" * 2_000_000, "larger than 1 MiB"),
        (DEEP.encode(), "train.py"),
        (b"\x7fELF\x02\x01\x01", "train.py"),
        (b"x = '\\ud800'\n" + b"-" * 3000 + b"1", None),
        (b"a" + b".b" * 20_000, None),
        (b"x = 1" + b"+1" * 30_000, None),
    ],
)
def test_poison_is_told_in_a_line(data: bytes, words: str | None, folder, capsys) -> None:
    """How deep an expression may be depends on the Python."""
    (folder / "train.py").write_bytes(data)
    code = run_command(["init", "train.py"])
    told = capsys.readouterr()
    assert code in (0, 2)
    assert words is None or (code == 2 and words in told.err)
    assert len(told.err) < 3000
    assert (folder / "job.toml").exists() == (code == 0)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["nosuch.py"], 2, "no such script"),
        (["."], 2, "is a directory"),
        ([], 2, "which script trains? none was found"),
        (["/dev/null"], 2, "is no file"),
        (["train.py", "--budget", "nan"], 2, ""),
    ],
)
def test_what_is_not_there(words, code, text, folder, capsys) -> None:
    assert run_command(["init", *words]) == code
    told = capsys.readouterr().err
    assert text in told
    assert "hint:" in told
    assert not (folder / "job.toml").exists()


def test_the_only_script_that_trains_is_found(folder, capsys) -> None:
    write(folder / "model.py", "import torch\n")
    write(folder / "broken.py", "import (")
    write(folder / "fit.py", scripts.LIGHTNING)
    assert run_init(capsys)["script"] == "fit.py"
    (folder / "job.toml").unlink()
    write(folder / "pretrain.py")
    assert run_command(["init"]) == 2
    assert "fit.py, pretrain.py" in capsys.readouterr().err
    write(folder / "train.py")
    assert run_init(capsys)["script"] == "train.py"


def test_a_folder_that_cannot_be_written(folder, capsys, monkeypatch) -> None:
    place = folder / "there"
    place.mkdir()
    write(place / "train.py")
    (place / "job.toml").mkdir()
    assert run_command(["init", "there/train.py"]) == 3
    assert "job.toml" in capsys.readouterr().err
    assert (place / "train.py").read_text() == scripts.STEPS


def test_the_next_command_is_said_for_the_folder(folder, capsys) -> None:
    (folder / "my jobs").mkdir()
    write(folder / "my jobs" / "train.py")
    assert run_command(["init", "my jobs/train.py"]) == 0
    said = "next: cd 'my jobs' && perdure run -c job.toml"
    assert f"{said}   # runs the script without these lines" in capsys.readouterr().out
    assert run_command(["init", "my jobs/train.py", "--apply"]) == 0
    assert capsys.readouterr().out.endswith(f"{said}\n")


ENGINE = """
import torch
from torch.utils.data import DataLoader


class Engine:
    def __init__(self):
        self.model = torch.nn.Linear(8, 1)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def fit(self, data):
        for epoch in range(3):
            for batch in DataLoader(data):
                self.opt.zero_grad()
                self.model(batch).sum().backward()
                self.opt.step()
"""
MAIN = """
import torch
import torch.distributed as dist
from mypkg.engine import Engine

dist.init_process_group("gloo")
Engine().fit(torch.randn(4, 8))
"""


@pytest.fixture
def package(folder: Path) -> Path:
    (folder / "mypkg").mkdir()
    write(folder / "mypkg" / "__init__.py", "")
    write(folder / "mypkg" / "engine.py", ENGINE)
    write(folder / "mypkg" / "train.py", MAIN)
    return folder


@pytest.mark.parametrize("where", ["above", "within", "absolute"])
def test_a_module_of_a_package_is_run_as_one(where, package, capsys, monkeypatch) -> None:
    name = "mypkg/train.py"
    if where == "within":
        monkeypatch.chdir(package / "mypkg")
        name = "train.py"
    if where == "absolute":
        name = str(package / name)
    document = run_init(capsys, name)
    assert Path(document["job_file"]).resolve() == package / "job.toml"
    monkeypatch.chdir(package)
    spec, _, _ = make_spec(RunOptions(config="job.toml", environ={}))
    assert (spec.script, spec.module, spec.name) == ("mypkg.train", True, "train")


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("mypkg/train.py", "mypkg.train"),
        ("mypkg/__main__.py", "mypkg"),
        ("tools/fit.py", "tools.fit"),
    ],
)
def test_a_module_is_named_as_to_python(file, name, package, capsys, monkeypatch) -> None:
    """Also one that imports nothing of its own package, and one in a folder that is none."""
    Path(file).parent.mkdir(exist_ok=True)
    write(package / file, "import torch\n")
    document = run_init(capsys, "-m", name, "--", "--lr", "0.1")
    assert (document["script"], document["job_file"]) == (file, "job.toml")
    spec, _, _ = make_spec(RunOptions(config="job.toml", environ={}))
    assert (spec.script, spec.module, spec.args) == (name, True, ("--lr", "0.1"))


@pytest.mark.parametrize("words", [["mypkg/train.py"], ["-m", "mypkg.train"]])
def test_patch_takes_the_diff_of_a_script_in_a_folder(words, package, capsys) -> None:
    write(package / "mypkg" / "train.py", scripts.STEPS)
    diff = run_init(capsys, *words)["diff"]
    subprocess.run(["patch", "-p0"], input=diff, text=True, check=True, timeout=PATIENCE_S)
    assert "run.steps(" in (package / "mypkg" / "train.py").read_text()


@pytest.mark.parametrize("name", ["mypkg.gone", "mypkg/train.py", "..mypkg", ""])
def test_a_module_that_is_none_is_refused(name, package, capsys) -> None:
    assert run_command(["init", "-m", *[name] * bool(name)]) == 2
    said = capsys.readouterr().err
    assert (f"no module `{name}` in this folder" if name else "without the name") in said
    assert "perdure init -m PACKAGE.MODULE" in said
    assert not Path("job.toml").exists()


def test_a_script_that_only_lies_in_a_package_is_run_as_it_is(package, capsys) -> None:
    write(package / "mypkg" / "train.py", MAIN.replace("from mypkg.engine", "from engine"))
    assert run_init(capsys, "mypkg/train.py")["job_file"] == "mypkg/job.toml"
    assert read_job_file("mypkg/job.toml")["script"] == "train.py"


@pytest.mark.parametrize("name", ["mypkg.engine", ".engine", "engine"])
def test_the_file_with_the_loop_is_named(name, package, capsys) -> None:
    write(package / "mypkg" / "train.py", MAIN.replace("mypkg.engine", name))
    document = run_init(capsys, "mypkg/train.py")
    assert "no training loop found" in document["why_no_diff"]
    where, *lines = document["by_hand"]
    assert where.startswith("line 13 of ")
    assert "mypkg/engine.py has a loop that trains" in where
    assert lines[1:3] == [
        "above line 13: run = perdure.init()",
        "above line 13: run.register(model=..., optimizer=...)",
    ]
    engine = run_init(capsys, "mypkg/engine.py")
    assert "the loop in line 13 belongs to an object" in engine["why_no_diff"]
    assert engine["by_hand"] == lines


def test_a_page_that_is_named_is_there(package, capsys) -> None:
    assert run_command(["init", "mypkg/train.py"]) == 0
    words = capsys.readouterr().out.split()
    (page,) = [word.strip("():") for word in words if word.endswith("init.md):")]
    assert Path(page).is_file()


SAVES = {
    'torch.save(state, f"{OUT}/ckpt-{step}.pt")': "out/ckpt-*.pt",
    'torch.save(state, os.path.join(OUT, f"{step}.pt"))': "out/*.pt",
    'torch.save(state, Path(OUT) / "last.pt"); torch.load(path)': "out/last.pt",
    'dcp.save(state, checkpoint_id=f"d/step-{step}")': "d/step-*",
    'save_file(state, f"w/{step:06}.safetensors")': "w/*.safetensors",
    'engine.save_checkpoint("ds")': "ds/global_step*",
    'ModelCheckpoint(dirpath="best")': "best/*.ckpt",
    'TrainingArguments(output_dir="res")': "res/checkpoint-*",
}
SAVER = """import os
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
OUT = "out"
"""


@pytest.mark.parametrize(("save", "pattern"), SAVES.items())
def test_the_line_for_own_checkpoints(save: str, pattern: str, folder: Path, capsys: Any) -> None:
    write(folder / "train.py", f"{SAVER}{save}\n")
    run_init(capsys, "train.py")
    checkpoint = read_job_file("job.toml")["checkpoint"]
    assert checkpoint["own"] == [pattern]
    assert checkpoint.get("own_copy", False) == ("*" not in pattern)


@pytest.mark.parametrize("save", ['torch.save(model, "model.pt")', "torch.save(model, path)"])
def test_no_line_for_a_result_or_an_unknown_place(save: str, folder: Path, capsys: Any) -> None:
    write(folder / "train.py", f"{SAVER}{save}\n")
    document = run_init(capsys, "train.py")
    assert read_job_file("job.toml")["checkpoint"] == {}
    assert '# own = ["out/checkpoint-*"]' in document["job_file_text"]
