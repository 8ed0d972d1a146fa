"""Files and links that name the newest checkpoint: torn ones, and those that name nothing."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
from tests.unit.test_own import save_deepspeed, save_sharded, save_tensors, save_torch

from perdure.adapters.own_away import OwnAway
from perdure.files.own import choose_place, examine, find_newest, set_aside
from perdure.files.pointers import list_naming

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:torch.distributed is")]


class Library:
    """One that begins where its pointer says."""

    def __init__(
        self, name: str, file: str, text: str, save: Callable[[Path, int], None] = save_sharded
    ) -> None:
        self.name, self.file, self.text, self.save_part = name, file, text, save

    @property
    def pattern(self) -> str:
        return "out/" + self.name.partition("{")[0] + "*" + self.name.rpartition("}")[2]

    def locate(self, out: Path, step: int) -> Path:
        return out / self.name.format(step)

    def save(self, out: Path, step: int) -> Path:
        path = self.locate(out, step)
        self.save_part(path, step)
        self.point(out, path, step)
        return path

    def point(self, out: Path, path: Path, step: int) -> None:
        text = self.text.format(step=step, name=path.name, out=out)
        (out / self.file).write_text(text)

    def read(self, out: Path) -> str:
        return (out / self.file).read_text()


def save_iteration(path: Path, step: int) -> None:
    save_torch(path / "mp_rank_00" / "model_optim_rng.pt", step)


def save_nanotron(path: Path, step: int) -> None:
    save_tensors(path / "model" / "w.safetensors", step)
    save_torch(path / "optimizer" / "optimizer.pt", step)


class Link(Library):
    """It has a link as its pointer."""

    def point(self, out: Path, path: Path, step: int) -> None:
        link = out / self.file
        link.unlink(missing_ok=True)
        link.symlink_to(path.name)

    def read(self, out: Path) -> str:
        return os.readlink(out / self.file)


class Copy(Library):
    """Its pointer is a copy of a file of the checkpoint."""

    def point(self, out: Path, path: Path, step: int) -> None:
        file = path / "train_state.pt"
        (out / self.file).write_bytes(file.read_bytes() if file.exists() else b"gone")

    def read(self, out: Path) -> str:
        return (out / self.file).read_bytes().hex()


def save_bridge(path: Path, step: int) -> None:
    save_sharded(path, step)
    save_torch(path / "train_state.pt", step)


TRACKER = "latest_checkpointed_iteration"
LIBRARIES = {
    "Megatron-LM": Library("iter_{:07d}", f"{TRACKER}.txt", "{step}"),
    "Megatron-LM, torch": Library("iter_{:07d}", f"{TRACKER}.txt", "{step}", save_iteration),
    "verl": Library("global_step_{}", f"{TRACKER}.txt", "{step}", save_iteration),
    "lm-engine": Library("global_step{}", f"{TRACKER}.json", f'{{{{"{TRACKER}": {{step}}}}}}'),
    "nanotron": Library("{}", "latest.txt", "{step}", save_nanotron),
    "Detectron2": Library("model_{:07d}.pth", "last_checkpoint", "{name}", save_torch),
    "MMEngine": Library("epoch_{}.pth", "last_checkpoint", "{out}/{name}", save_torch),
    "NeMo AutoModel": Library("epoch_0_step_{}", "LATEST.txt", "{name}"),
    "Megatron-Bridge": Copy("iter_{:07d}", "latest_train_state.pt", "", save_bridge),
    "DeepSpeed": Library("global_step{}", "latest", "{name}", save_deepspeed),
    "Lightning": Link("step={}.ckpt", "last.ckpt", "", save_torch),
    "Composer": Link("ba{}-rank0.pt", "latest-rank0.pt", "", save_torch),
    "OLMo": Link("step{}", "latest", ""),
}
pytestmark.append(pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES))


def cut(path: Path) -> None:
    files = sorted(path.rglob("*.*")) if path.is_dir() else [path]
    files = [file for file in files if file.name != "train_state.pt"]
    files[-1].write_bytes(files[-1].read_bytes()[:10])


def mend(pattern: str, cwd: Path) -> list[str]:
    """Move what is torn, as an agent does; return its names."""
    torn, whole = find_newest(pattern, str(cwd))
    for one in torn:
        target = choose_place(one.path, str(cwd / "out"), str(cwd))
        set_aside(one.path, target, whole.path if whole else "")
    assert find_newest(pattern, str(cwd)) == ([], whole)
    return [Path(one.path).name for one in torn]


def test_a_torn_newest_one_is_no_longer_named(library: Library, tmp_path: Path) -> None:
    out = tmp_path / "out"
    library.save(out, 90)
    wanted = library.read(out)
    path = library.save(out, 120)
    assert [Path(one).name for one in list_naming(str(path))] == [library.file]
    cut(path)
    assert mend(library.pattern, tmp_path) == [path.name]
    assert library.read(out) == wanted
    assert (tmp_path / "out.torn" / path.name).exists()


def test_the_only_one_is_torn(library: Library, tmp_path: Path) -> None:
    """Without its pointer, a library begins from step 0, as it has to."""
    path = library.save(tmp_path / "out", 90)
    cut(path)
    assert mend(library.pattern, tmp_path) == [path.name]
    assert not (tmp_path / "out" / library.file).exists()


@pytest.mark.parametrize("how", ["empty", "gone", "loop", "moved"])
def test_a_pointer_to_nothing_names_the_newest_whole_one(
    library: Library, tmp_path: Path, how: str
) -> None:
    """A kill came between its two system calls, or retention removed what it names."""
    out = tmp_path / "out"
    library.save(out, 90)
    library.save(out, 120)
    wanted = library.read(out)
    library.point(out, library.locate(out, 150), 150)
    if how == "empty" and not isinstance(library, Link):
        (out / library.file).write_text("")
    if how == "loop" and isinstance(library, Link):  # Lightning has made such links.
        (out / library.file).unlink()
        (out / library.file).symlink_to(library.file)
    if how == "moved" and isinstance(library, Link):  # From another machine, or to its own folder.
        (out / library.file).unlink()
        (out / library.file).symlink_to(library.locate(Path("out"), 90))
    assert mend(library.pattern, tmp_path) == [library.file]
    assert library.locate(out, 120).exists()
    if how != "empty" or library.file != "last_checkpoint":
        assert library.read(out) == wanted
    else:  # A path is right for both libraries.
        assert library.read(out) == str(library.locate(out, 120))
    assert os.path.lexists(tmp_path / "out.torn" / library.file)


def test_a_save_that_is_not_named_yet_has_not_ended(library: Library, tmp_path: Path) -> None:
    out = tmp_path / "out"
    older = library.save(out, 90)
    path = library.save(out, 120)
    library.point(out, older, 90)
    if path.is_dir() and not isinstance(library, Link):
        found = examine(str(path))
        assert (found.state, found.why) == ("unknown", f"{library.file} does not name it yet")
    assert mend(library.pattern, tmp_path) == []


def test_a_copy_comes_with_its_pointer(library: Library, tmp_path: Path) -> None:
    """A library that finds no pointer on the new machine would begin from step 0."""
    here, there, url = tmp_path / "here", tmp_path / "there", str(tmp_path / "url")
    out = here / "out"
    path = library.save(out, 90)
    (out / library.file).unlink()
    away = OwnAway(url, "j", library.pattern, str(here))
    whole = find_newest(library.pattern, str(here))[1]
    assert whole is not None
    assert away.upload(whole), "it is copied before its library has named it"
    library.point(out, path, 90)
    assert not away.upload(whole)
    fetched = OwnAway(url, "j", library.pattern, str(there)).fetch(60.0)
    assert fetched == str(there / "out" / path.name)
    assert list_naming(fetched) == [str(there / "out" / library.file)]
    assert sorted(os.listdir(there)) == ["out"]


def test_another_text_is_left_as_it_is(library: Library, tmp_path: Path) -> None:
    """Megatron-LM's `release`, and files of the same name that are no pointers."""
    out = tmp_path / "out"
    library.save(out, 90)
    (out / library.file).unlink()
    if isinstance(library, Copy):
        library.point(out, library.locate(out, 90), 90)
    elif isinstance(library, Link):
        (out / library.file).symlink_to("/away/step-120")  # Another disk, which is not mounted.
    else:
        by_name = library.file in ("latest", "last_checkpoint", "LATEST.txt")
        (out / library.file).write_text("/away/step-120" if by_name else "release")
    before = library.read(out)
    assert mend(library.pattern, tmp_path) == []
    assert library.read(out) == before


def test_a_file_of_another_script_is_no_pointer(library: Library, tmp_path: Path) -> None:
    out = tmp_path / "out"
    save_torch(out / "ckpt-7.pt", 7)
    (out / library.file).write_text("")
    if not isinstance(library, Link | Copy):
        assert mend("out/ckpt-*", tmp_path) == []
        assert (out / library.file).exists()


def test_json_stays_json(library: Library, tmp_path: Path) -> None:
    if library.file.endswith(".json"):
        out = tmp_path / "out"
        library.save(out, 90)
        cut(library.save(out, 120))
        mend(library.pattern, tmp_path)
        assert json.loads(library.read(out)) == {TRACKER: 90}
