"""Which checkpoints of a script are whole, torn, or not known: each format, cut at every place."""

import contextlib
import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import torch.distributed.checkpoint as dcp  # noqa: E402

from perdure.cli.looking.own import list_own  # noqa: E402
from perdure.files.own import (  # noqa: E402
    OwnCheckpoint,
    choose_place,
    copy_whole,
    examine,
    examine_alone,
    find_newest,
    find_root,
    list_declared,
    put_back,
    set_aside,
)
from perdure.files.pointers import find_stand_in, list_numbers  # noqa: E402
from perdure.model.job import CheckpointConfig, JobSpec  # noqa: E402
from perdure.worker.start.unloadable import find_unloadable  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:torch.distributed is")]


def save_torch(path: Path, step: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"step": step, "w": torch.zeros(64)}, path)


def save_tensors(path: Path, step: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    info = {"w": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}}
    header = json.dumps(info).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(256))


def save_trainer(path: Path, step: int) -> None:
    save_tensors(path / "model.safetensors", step)
    (path / "config.json").write_text('{"a": 1}')
    save_torch(path / "training_args.bin", step)
    save_torch(path / "optimizer.pt", step)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))


def save_accelerate(path: Path, step: int) -> None:
    save_tensors(path / "model.safetensors", step)
    save_torch(path / "optimizer.bin", step)
    save_torch(path / "random_states_0.pkl", step)


def save_sharded(path: Path, step: int) -> None:
    dcp.save({"w": torch.zeros(64), "step": step}, checkpoint_id=path, no_dist=True)


def save_deepspeed(path: Path, step: int) -> None:
    save_torch(path / "mp_rank_00_model_states.pt", step)
    save_torch(path / "zero_pp_rank_0_mp_rank_00_optim_states.pt", step)
    (path.parent / "latest").write_text(path.name)


FORMATS: dict[str, tuple[Callable[[Path, int], None], str]] = {
    "torch.save": (save_torch, "ckpt-{}.pt"),
    "safetensors": (save_tensors, "{}.safetensors"),
    "Trainer": (save_trainer, "checkpoint-{}"),
    "accelerate": (save_accelerate, "checkpoint_{}"),
    "torch.distributed.checkpoint": (save_sharded, "step-{}"),
    "DeepSpeed": (save_deepspeed, "global_step{}"),
}


def make(folder: Path, form: str, step: int) -> Path:
    save, name = FORMATS[form]
    path = folder / name.format(step)
    save(path, step)
    return path


def list_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())


@pytest.mark.parametrize("form", FORMATS)
def test_a_whole_one_is_whole_and_each_cut_is_torn(form: str, tmp_path: Path) -> None:
    older = make(tmp_path, form, 1)
    path = make(tmp_path, form, 20)
    found = examine(str(path), [str(older)])
    assert (found.state, found.format, found.step) == ("whole", form, 20), found
    for file in list_files(path):
        data = file.read_bytes()
        for size in sorted({0, 1, 4, len(data) // 2, len(data) - 1}):
            file.write_bytes(data[:size])
            cut = examine(str(path), [str(older)])
            assert cut.state == "torn", (file.name, size, cut)
        file.write_bytes(data)
    assert examine(str(path), [str(older)]).state == "whole"


@pytest.mark.parametrize("form", ["Trainer", "accelerate", "torch.distributed.checkpoint"])
def test_a_folder_without_what_is_written_last_is_torn(form: str, tmp_path: Path) -> None:
    older, path = make(tmp_path, form, 1), make(tmp_path, form, 20)
    last = {"Trainer": "trainer_state.json", "accelerate": "random_states_0.pkl"}
    (path / last.get(form, ".metadata")).unlink()
    assert examine(str(path), [str(older)]).state == "torn"


def test_shards_of_several_ranks_without_an_index_are_torn(tmp_path: Path) -> None:
    path = make(tmp_path, "torch.distributed.checkpoint", 1)
    (path / "__1_0.distcp").write_bytes(bytes(64))
    (path / ".metadata").unlink()
    assert examine(str(path)).state == "torn"


def test_a_file_of_each_rank(tmp_path: Path) -> None:
    path = tmp_path / "step_100"
    for rank in (0, 1):
        save_torch(path / f"rank-{rank}.pt", 100)
    assert examine(str(path)).state == "whole"
    (path / "rank-1.pt").write_bytes(b"PK\x03\x04")
    assert examine(str(path)).state == "torn"


def test_deepspeed_names_the_newest_one(tmp_path: Path) -> None:
    older, path = make(tmp_path, "DeepSpeed", 1), make(tmp_path, "DeepSpeed", 20)
    (tmp_path / "latest").write_text(older.name)
    assert examine(str(path)).state == "unknown", "its save has not ended"
    torn, whole = find_newest("global_step*", str(tmp_path))
    assert not torn
    assert whole is not None
    assert whole.path == str(older)
    (tmp_path / "latest").write_text(path.name)
    (path / "mp_rank_00_model_states.pt").write_bytes(b"PK\x03\x04")
    torn, whole = find_newest("global_step*", str(tmp_path))
    assert whole is not None
    target = choose_place(torn[0].path, str(tmp_path / "out"), str(tmp_path))
    set_aside(torn[0].path, target, whole.path)
    assert (tmp_path / "latest").read_text() == older.name


@pytest.mark.parametrize("lost", ["zero_pp_rank_1_mp_rank_00_optim_states.pt",
                                  "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"])  # fmt: skip
def test_a_folder_of_deepspeed_without_a_file_of_each_rank_is_torn(
    tmp_path: Path, lost: str
) -> None:
    """Rank 0 writes `latest` and waits for no other rank before."""
    older, path = make(tmp_path, "DeepSpeed", 1), make(tmp_path, "DeepSpeed", 20)
    (path / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    for rank in (0, 1):
        save_torch(path / lost.replace("rank_1", "rank_0").replace("rank_0_", f"rank_{rank}_"), 20)
    state = {"module": {"w": torch.zeros(9)}, "dp_world_size": 2, "ds_config": {}, "my": Path("a")}
    torch.save(state, path / "mp_rank_00_model_states.pt")
    assert examine(str(path), [str(older)]).state == "whole"
    (path / lost).unlink()
    found = examine(str(path), [str(older)])
    assert (found.state, found.why.split()[0]) == ("torn", lost)
    state["ds_config"] = {"checkpoint": {"use_node_local_storage": True}}
    torch.save(state, path / "mp_rank_00_model_states.pt")
    assert examine(str(path), [str(older)]).state == "whole", "another node has the file"


@pytest.mark.parametrize("ranks", ["2", 2.0, None, [2]])
def test_a_state_of_deepspeed_that_is_not_understood_is_not_torn(
    tmp_path: Path, ranks: object
) -> None:
    path = make(tmp_path, "DeepSpeed", 20)
    torch.save({"dp_world_size": ranks}, path / "mp_rank_00_model_states.pt")
    assert examine(str(path)).state == "whole"
    torch.save([ranks], path / "mp_rank_00_model_states.pt")
    assert examine(str(path)).state == "whole"


def test_a_pipeline_of_deepspeed_is_whole(tmp_path: Path) -> None:
    """The files of its layers have no number of ranks, and their names sort first."""
    path = make(tmp_path, "DeepSpeed", 20)
    torch.save(torch.nn.Linear(2, 2).state_dict(), path / "layer_00-model_00-model_states.pt")
    torch.save({"dp_world_size": 1}, path / "mp_rank_00_model_states.pt")
    assert examine(str(path)).state == "whole"
    torch.save({"dp_world_size": 2}, path / "mp_rank_00_model_states.pt")
    assert examine(str(path)).state == "torn"


def test_only_the_first_group_of_mics_writes(tmp_path: Path) -> None:
    path = make(tmp_path, "DeepSpeed", 20)
    state = {"dp_world_size": 4, "ds_config": {"zero_optimization": {"mics_shard_size": 1}}}
    torch.save(state, path / "mp_rank_00_model_states.pt")
    assert examine(str(path)).state == "whole"


def test_a_large_number_of_ranks_takes_no_memory(tmp_path: Path) -> None:
    path = make(tmp_path, "DeepSpeed", 20)
    torch.save({"dp_world_size": 1 << 40}, path / "mp_rank_00_model_states.pt")
    assert examine(str(path)).why.startswith("zero_pp_rank_1_mp_rank_00_optim_states.pt is missing")


@pytest.mark.parametrize("tag", ["", "global_st"])
def test_a_torn_latest_of_deepspeed_names_the_newest_whole_one_again(
    tmp_path: Path, tag: str
) -> None:
    """The kill came between the emptying of `latest` and its content."""
    out = tmp_path / "out"
    paths = [make(out, "DeepSpeed", step) for step in (1, 2)]
    latest = out / "latest"
    latest.write_text(tag)
    (torn,), whole = find_newest("out/global_step*", str(tmp_path))
    assert (torn.path, torn.state) == (str(latest), "torn")
    assert whole is not None
    assert whole.path == str(paths[1])
    target = choose_place(torn.path, str(out), str(tmp_path))
    set_aside(torn.path, target, whole.path)
    assert latest.read_text() == paths[1].name
    assert Path(target).read_text() == tag
    assert find_newest("out/global_step*", str(tmp_path)) == ([], whole)


@pytest.mark.parametrize("other", [False, True])
def test_a_torn_latest_of_a_first_save_goes_with_it(tmp_path: Path, *, other: bool) -> None:
    """DeepSpeed begins from step 0 without `latest`, and fails to load what an empty one names."""
    path = make(tmp_path / "runs" / "a", "DeepSpeed", 9)
    (path / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"PK\x03\x04")
    latest = path.parent / "latest"
    latest.write_text("")
    if other:
        make(tmp_path / "runs" / "b", "DeepSpeed", 3)
    torn, whole = find_newest("runs/*/global_step*", str(tmp_path))
    assert {one.path for one in torn} == {str(path), str(latest)}
    for one in torn:
        target = choose_place(one.path, str(tmp_path / "runs"), str(tmp_path))
        set_aside(one.path, target, whole.path if whole else "")
    assert not path.exists()
    assert not latest.exists()
    assert find_newest("runs/*/global_step*", str(tmp_path)) == ([], whole)


@pytest.mark.parametrize(
    "content",
    [b"own format", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", b"PK\x05\x06" + bytes(18)],
)
def test_what_is_not_understood_is_not_torn(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "ckpt-3.pt"
    path.write_bytes(content)
    assert examine(str(path)).state == "unknown"


def test_what_cannot_be_read_is_not_torn(tmp_path: Path) -> None:
    fifo = tmp_path / "ckpt-1.pt"
    os.mkfifo(fifo)
    assert examine(str(fifo)).state == "unknown"
    assert examine(str(tmp_path / "ckpt-2.pt")).state == "unknown"
    path = make(tmp_path, "torch.distributed.checkpoint", 3)
    (path / ".metadata").unlink()
    (path / ".metadata").mkdir()
    assert examine(str(path)).state != "whole"


def test_a_pipe_in_a_folder_is_no_empty_file(tmp_path: Path) -> None:
    path = make(tmp_path, "Trainer", 3)
    os.mkfifo(path / "queue.pt")
    assert examine(str(path)).state == "whole"


@pytest.mark.parametrize("name", ["run[1]", "what?", "*", "data.copy", "old.torn", "a\nb \udcff"])
def test_the_jobs_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    cwd = tmp_path / name
    whole, torn = (make(cwd / "out", "torch.save", step) for step in (1, 2))
    torn.write_bytes(b"PK\x03\x04")
    assert find_root("out/ckpt-*.pt", str(cwd)) == str(cwd / "out")
    for pattern in ("out/ckpt-*.pt", "out/ckpt-2.pt", "*/ckpt-?.pt"):
        assert list_torn(pattern, cwd) == [torn.name]
    one, pattern = examine_alone(str(torn))
    assert (one.state, list_declared(pattern, "/")) == ("torn", [str(torn), str(whole)])
    assert find_newest(pattern, str(cwd))[1] == examine(str(whole))


def test_checkpoints_of_an_unknown_format_cost_no_more_than_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(200):
        (tmp_path / f"ckpt-{number}").mkdir()
        (tmp_path / f"ckpt-{number}" / "own.format").write_text("a")
    read, listed = os.listdir, list[str]()

    def count(path: str) -> list[str]:
        listed.append(path)
        return read(path)

    monkeypatch.setattr(os, "listdir", count)
    assert find_newest("ckpt-*", str(tmp_path)) == ([], None)
    assert len(listed) <= 200 * 32


def test_a_folder_of_checkpoints_is_none(tmp_path: Path) -> None:
    """A pattern that is one level too high must not take the whole ones along."""
    out = tmp_path / "out"
    for step in (1, 2):
        make(out, "Trainer", step)
    (out / "checkpoint-2" / "model.safetensors").write_bytes(b"x")
    assert examine(str(out)).state == "unknown"
    run = tmp_path / "run-1"
    for step in (1, 2):
        make(run, "torch.save", step)
    (run / "ckpt-2.pt").write_bytes(b"PK\x03\x04")
    assert examine(str(run)).state == "unknown"


def test_a_model_saved_by_hand_is_not_the_trainers(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-4"
    save_tensors(path / "model.safetensors", 4)
    (path / "config.json").write_text("{}")
    assert examine(str(path)).state == "whole"
    final = make(tmp_path, "Trainer", 9).rename(tmp_path / "checkpoint-final")
    (final / "trainer_state.json").unlink()
    assert examine(str(final), [str(make(tmp_path, "Trainer", 8))]).state == "whole"


def test_the_newest_goes_by_number_and_by_time(tmp_path: Path) -> None:
    paths = [make(tmp_path, "torch.save", step) for step in (9, 10, 100)]
    assert list_declared("ckpt-*.pt", str(tmp_path)) == [str(p) for p in reversed(paths)]
    paths[0].write_bytes(b"PK\x03\x04")
    os.utime(paths[0], (2e9, 2e9))  # A script that goes by time takes this one.
    torn, whole = find_newest("ckpt-*.pt", str(tmp_path))
    assert [one.path for one in torn] == [str(paths[0])]
    assert whole is not None
    assert whole.path == str(paths[2])


def test_two_patterns_of_one_checkpoint_list_it_once(tmp_path: Path) -> None:
    paths = [make(tmp_path, "torch.save", step) for step in (9, 10)]
    own = CheckpointConfig(own=("ckpt-*.pt", "*.pt"))
    spec = JobSpec(name="j", script="t.py", cwd=str(tmp_path), checkpoint=own)
    assert [one.path for one in list_own(spec)] == [str(path) for path in paths]


def test_where_a_torn_one_goes(tmp_path: Path) -> None:
    cwd = str(tmp_path)
    assert find_root("out/*/ckpt-*", cwd) == f"{cwd}/out"
    root = find_root("out/checkpoint-*", cwd)
    assert choose_place(f"{root}/checkpoint-3", root, cwd) == f"{cwd}/out.torn/checkpoint-3"
    (tmp_path / "out.torn" / "checkpoint-3").mkdir(parents=True)
    assert choose_place(f"{root}/checkpoint-3", root, cwd) == f"{cwd}/out.torn/checkpoint-3-2"
    assert (
        choose_place(f"{cwd}/model.pt", find_root("model.pt", cwd), cwd) == f"{cwd}/.torn/model.pt"
    )


def test_only_a_whole_file_is_copied(tmp_path: Path) -> None:
    path, copy = make(tmp_path, "torch.save", 1), tmp_path / "copy" / "ckpt-1.pt"
    assert copy_whole(str(path), str(copy))
    before = copy.read_bytes()
    path.write_bytes(before[:100])
    assert not copy_whole(str(path), str(copy))
    assert copy.read_bytes() == before
    assert list(copy.parent.iterdir()) == [copy]


def test_a_file_of_any_name_is_copied(tmp_path: Path) -> None:
    path, copy = tmp_path / "state", tmp_path / "copy" / "state"
    save_torch(path, 1)
    assert copy_whole(str(path), str(copy))
    assert copy.read_bytes() == path.read_bytes()


def test_a_save_in_progress_is_not_copied_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path, "torch.save", 1)
    path.write_bytes(path.read_bytes()[:-1])

    def refuse(*args: object) -> None:
        raise AssertionError("a copy began")

    monkeypatch.setattr("perdure.files.own.fcntl.ioctl", refuse)
    assert not copy_whole(str(path), str(tmp_path / "copy"))


@pytest.mark.parametrize(
    ("instant", "new"),
    [
        ("perdure.files.own.open_room", False),
        ("perdure.files.own._copy_bytes", False),
        ("os.fsync", True),
        ("os.utime", True),
        ("os.replace", True),
    ],
)
def test_a_save_may_begin_at_any_instant_of_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instant: str, *, new: bool
) -> None:
    """A kill during that save leaves a torn file: some whole save is in the copy then."""
    path, copy = make(tmp_path, "torch.save", 1), tmp_path / "copy" / "ckpt-1.pt"
    os.utime(path, (1.0, 1.0))
    assert copy_whole(str(path), str(copy))
    older, newer = path.read_bytes(), make(tmp_path / "other", "torch.save", 2).read_bytes()
    path.write_bytes(newer)
    module, _, name = instant.rpartition(".")
    act = getattr(importlib.import_module(module), name)

    def begin_save(*args: object, **keys: object) -> object:
        path.write_bytes(newer[:100])
        return act(*args, **keys)

    monkeypatch.setattr(instant, begin_save)
    assert copy_whole(str(path), str(copy)) is new
    assert copy.read_bytes() == (newer if new else older)


def test_what_comes_late_changes_nothing(tmp_path: Path) -> None:
    """The disk hung, and ranks were started: they may write the same files by now."""
    path, copy = make(tmp_path, "torch.save", 1), tmp_path / "copy.pt"
    assert copy_whole(str(path), str(copy))
    path.write_bytes(b"PK\x03\x04")
    target = tmp_path / "out.torn" / path.name
    with pytest.raises(TimeoutError):
        put_back(str(copy), str(path), str(target), 0.0)
    with pytest.raises(TimeoutError):
        set_aside(str(path), str(target), "", 0.0)
    assert path.read_bytes() == b"PK\x03\x04"
    assert not target.exists()
    assert {one.name for one in tmp_path.iterdir()} == {path.name, copy.name, "out.torn"}


@pytest.mark.parametrize("form", FORMATS)
def test_a_failed_load_is_told_with_its_file(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    older, path = make(tmp_path / "out", form, 1), make(tmp_path / "out", form, 20)
    for file in list_files(path):
        file.write_bytes(file.read_bytes()[:10])

    def load(folder: str) -> None:
        for file in list_files(Path(folder)):
            raise EOFError(f"cannot load {file.name}")

    try:
        load(str(path))
    except EOFError as error:
        torn, why = find_unloadable(error, error.__traceback__)
    assert torn == str(path)
    assert f"the newest whole one is out/{older.name}" in why
    assert f"mv out/{path.name} out.torn/{path.name}" in why
    assert find_unloadable(ValueError(str(path)), None) == ("", ""), "it is no load"


def list_torn(pattern: str, folder: Path) -> list[str]:
    return [os.path.basename(one.path) for one in find_newest(pattern, str(folder))[0]]


def test_an_empty_mark_or_folder_beside_checkpoints_is_none(tmp_path: Path) -> None:
    make(tmp_path, "Trainer", 100)
    (tmp_path / "checkpoint-100.done").touch()
    (tmp_path / "logs").mkdir()
    assert list_torn("*", tmp_path) == []
    (tmp_path / "checkpoint-200").mkdir()
    assert list_torn("*", tmp_path) == ["checkpoint-200"]
    (tmp_path / "model").touch()
    assert list_torn("model", tmp_path) == ["model"], "its name alone is declared"


def test_models_that_the_trainer_saves_without_its_state_are_whole(tmp_path: Path) -> None:
    for step in (100, 200):
        path = make(tmp_path, "Trainer", step)
        (path / "trainer_state.json").unlink()
        (path / "optimizer.pt").unlink()
    assert list_torn("checkpoint-*", tmp_path) == []
    (path / "optimizer.pt").write_bytes((path / "training_args.bin").read_bytes())
    assert examine(str(path)).state == "torn", "the Trainer's own save was cut"


def test_a_folder_that_may_not_be_read_is_not_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path, "Trainer", 1)

    def refuse(folder: str) -> None:
        raise PermissionError(13, "Permission denied", folder)

    monkeypatch.setattr(os, "scandir", refuse)
    found = examine(str(path))
    assert (found.state, found.why) == ("unknown", "Permission denied")


def test_files_behind_links_are_there(tmp_path: Path) -> None:
    path = make(tmp_path, "Trainer", 1)
    (path / "model.safetensors").unlink()
    save_tensors(tmp_path / "blobs" / "model-1.safetensors", 1)
    (path / "w").symlink_to(tmp_path / "blobs")
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "w/model-1.safetensors"}}))
    assert examine(str(path)).state == "whole"
    (tmp_path / "blobs" / "model-1.safetensors").unlink()
    assert examine(str(path)).state == "torn"


@pytest.mark.parametrize(
    ("name", "text"), [("latest", "weights.pt"), ("config.json", "{}" + "\n" * 100)]
)
def test_odd_but_whole_documents(tmp_path: Path, name: str, text: str) -> None:
    path = make(tmp_path, "Trainer", 1)
    (path / name).write_text(text)
    assert examine(str(path)).state == "whole"


def test_a_reason_is_short(tmp_path: Path) -> None:
    info = {"x" * 100_000: {"dtype": "F32", "shape": [1], "data_offsets": [0, 256]}}
    header = json.dumps(info).encode()
    path = tmp_path / "1.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(256))
    assert examine(str(path)).state == "torn"
    assert len(examine(str(path)).why) <= 300


def test_a_torn_one_stays_on_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`out` is a link to another disk: nothing can be renamed to a folder beside the link."""
    disk = tmp_path / "disk"
    path = make(disk, "torch.save", 1)
    (tmp_path / "out").symlink_to(disk)
    path.write_bytes(b"PK\x03\x04")
    found = os.stat

    def stat(name: str, **keys: bool) -> os.stat_result:
        status = found(name, **keys)
        if not os.path.realpath(name).startswith(str(disk)):
            return status
        return os.stat_result((*status[:2], status.st_dev + 1, *status[3:]))

    monkeypatch.setattr(os, "stat", stat)
    torn = str(tmp_path / "out" / path.name)
    for pattern in ("out/*.pt", "*/*.pt"):
        root = find_root(pattern, str(tmp_path))
        target = choose_place(torn, root, str(tmp_path))
        assert target == str(tmp_path / "out" / ".torn" / path.name)


def test_each_run_of_deepspeed_has_its_own_latest(tmp_path: Path) -> None:
    a, b = tmp_path / "runs" / "a", tmp_path / "runs" / "b"
    older, path = make(a, "DeepSpeed", 10), make(a, "DeepSpeed", 20)
    make(b, "DeepSpeed", 15)
    (path / "mp_rank_00_model_states.pt").write_bytes(b"PK\x03\x04")
    (torn,), whole = find_newest("runs/*/global_step*", str(tmp_path))
    assert whole is not None
    set_aside(torn.path, str(tmp_path / "away"), whole.path)
    assert (a / "latest").read_text() == older.name


@pytest.mark.parametrize("torn_latest", [False, True])
def test_a_death_amid_a_move_leaves_a_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, torn_latest: bool
) -> None:
    """Without `latest`, DeepSpeed begins from step 0: it always names one that can be loaded."""
    out = tmp_path / "out"
    older, path = make(out, "DeepSpeed", 1), make(out, "DeepSpeed", 2)
    if torn_latest:
        (out / "latest").write_text("")
    else:
        (path / "mp_rank_00_model_states.pt").write_bytes(b"PK\x03\x04")
    (torn,), whole = find_newest("out/global_step*", str(tmp_path))
    assert whole is not None

    def die(source: str, target: str) -> None:
        raise OSError("dead")

    monkeypatch.setattr(os, "rename", die)
    monkeypatch.setattr("perdure.files.own.sync_path", die)
    with contextlib.suppress(OSError):
        set_aside(torn.path, str(tmp_path / "away"), whole.path)
    assert (out / "latest").read_text() == (path if torn_latest else older).name


def test_a_link_to_a_torn_one_leads_to_the_newest_whole_one(tmp_path: Path) -> None:
    """Lightning's `save_last="link"`: without a file behind the link, it begins from step 0."""
    out = tmp_path / "out"
    whole, path = (out / f"step={step}.ckpt" for step in (1, 2))
    save_torch(whole, 1)
    path.write_bytes(b"PK\x03\x04")
    for name in ("last.ckpt", "other.ckpt", "gone.ckpt"):
        (out / name).symlink_to({"last": path, "other": whole}.get(name[:-5], out / "no").name)
    (torn,), found = find_newest("out/*.ckpt", str(tmp_path))
    assert found is not None
    set_aside(torn.path, str(tmp_path / "away"), found.path)
    links = {link.name: os.readlink(link) for link in out.iterdir() if link.is_symlink()}
    assert links == {"last.ckpt": whole.name, "other.ckpt": whole.name, "gone.ckpt": "no"}


def test_an_overwritten_file_is_never_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, copy = make(tmp_path, "torch.save", 1), tmp_path / "copy" / "ckpt-1.pt"
    target = tmp_path / "out.torn" / "ckpt-1.pt"
    assert copy_whole(str(path), str(copy))
    path.write_bytes(b"PK\x03\x04")
    replace = os.replace

    def look(source: str, place: str) -> None:
        assert path.exists()
        assert target.read_bytes() == b"PK\x03\x04"
        replace(source, place)

    monkeypatch.setattr(os, "replace", look)
    assert put_back(str(copy), str(path), str(target))
    assert path.read_bytes() == copy.read_bytes()
    assert target.read_bytes() == b"PK\x03\x04"
    copy.write_bytes(b"PK\x03\x04")
    assert not put_back(str(copy), str(path), str(tmp_path / "other")), "the copy is torn as well"
    assert not (tmp_path / "other").exists()


def test_files_of_several_ranks_are_one_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for step in ("1", "2", "_last"):
        for shard in (0, 1):
            save_torch(out / f"ckpt{step}-shard{shard}.pt", 0)
    for shard in (8, 16):  # They are no ranks: none of them is the first.
        save_torch(out / f"lora-rank{shard}.pt", 0)
    (out / "lora-rank16.pt").write_bytes(b"PK\x03\x04")
    (out / "ckpt2-shard0.pt").write_bytes(b"PK\x03\x04")
    for shard in (0, 1):
        os.utime(out / f"ckpt2-shard{shard}.pt", (9e9, 9e9))
        os.utime(out / f"ckpt_last-shard{shard}.pt", (8e9, 8e9))
    torn, whole = find_newest("out/ckpt[0-9]*", str(tmp_path))
    assert [Path(one.path).name for one in torn] == ["ckpt2-shard1.pt", "ckpt2-shard0.pt"]
    assert torn[0].why == "ckpt2-shard0.pt beside it is torn"
    assert whole is not None
    for one in torn:
        assert one.path in [one.path for one in find_newest("out/ckpt[0-9]*", str(tmp_path))[0]]
        set_aside(one.path, choose_place(one.path, str(out), str(tmp_path)), whole.path)
    torn, whole = find_newest("out/ckpt[0-9]*", str(tmp_path))
    assert not torn
    assert whole is not None
    assert Path(whole.path).name.startswith("ckpt1-shard")
    (torn_one,), _ = find_newest("out/lora-*", str(tmp_path))
    assert Path(torn_one.path).name == "lora-rank16.pt"


PAIRS = {
    "allennlp": ["model_state_e{}_b0.th", "training_state_e{}_b0.th"],
    "HiFi-GAN": ["g_{:08d}", "do_{:08d}"],
    "VITS": ["G_{}.pth", "D_{}.pth", "DUR_{}.pth"],
    "ranks": ["model-{}-rank0.pt", "model-{}-rank1.pt", "optim-{}-rank0.pt", "optim-{}-rank1.pt"],
}


def save_pairs(out: Path, names: list[str], steps: range) -> list[Path]:
    """Save files of several names, with metrics beside them; return those of the last step."""
    for step in steps:
        for name in names:
            save_torch(out / name.format(step), step)
        (out / f"metrics_{step}.json").write_text("{}")
    return [out / name.format(steps[-1]) for name in names]


def list_names(found: tuple[list[OwnCheckpoint], OwnCheckpoint | None]) -> tuple[set[str], int]:
    """Return the names of the torn ones, and the step of the newest whole one."""
    torn, whole = found
    return {Path(one.path).name for one in torn}, int(list_numbers(whole.path)[0]) if whole else -1


@pytest.mark.parametrize("victim", [0, -1])
@pytest.mark.parametrize("names", PAIRS.values(), ids=PAIRS)
def test_files_of_one_step_go_together(tmp_path: Path, names: list[str], victim: int) -> None:
    """Otherwise a script begins with a generator of one step and a discriminator of another."""
    files = save_pairs(tmp_path / "out", names, range(8, 12))
    assert list_names(find_newest("out/*", str(tmp_path))) == (set(), 11)
    files[victim].write_bytes(files[victim].read_bytes()[:100])
    for left in range(len(files), 0, -1):
        torn, whole = find_newest("out/*", str(tmp_path))
        assert list_names((torn, whole)) == ({file.name for file in files if file.exists()}, 10)
        assert len(torn) == left
        target = choose_place(torn[0].path, str(tmp_path / "out"), str(tmp_path))
        set_aside(torn[0].path, target, whole.path)
    assert list_names(find_newest("out/*", str(tmp_path))) == (set(), 10)
    assert (tmp_path / "out" / "metrics_11.json").exists()


def test_a_file_whose_pair_is_missing_is_not_the_newest_whole_one(tmp_path: Path) -> None:
    """A kill came between the two files."""
    _, second = save_pairs(tmp_path / "out", PAIRS["allennlp"], range(3))
    second.unlink()
    assert list_names(find_newest("out/*_state_*", str(tmp_path))) == (set(), 1)


def test_a_whole_file_stays_while_another_program_writes_its_pair(tmp_path: Path) -> None:
    """The agent looks twice, and moves what has not changed since."""
    first, second = save_pairs(tmp_path / "out", PAIRS["HiFi-GAN"], range(3))
    data, marks = second.read_bytes(), list[set[object]]()
    for num_bytes in (100, 200):
        second.write_bytes(data[:num_bytes])
        os.utime(second, (num_bytes, num_bytes))
        torn, _ = find_newest("out/*", str(tmp_path))
        assert {one.path for one in torn} == {str(first), str(second)}
        marks.append({one.mark for one in torn})
    assert not marks[0] & marks[1]


def test_adapters_of_other_ranks_have_files_of_their_own(tmp_path: Path) -> None:
    """In lora-rank16 the number is no rank of a job."""
    names = [f"{kind}-rank{rank}_{{}}.pt" for kind in ("lora", "optim") for rank in (8, 16)]
    *_, torn = save_pairs(tmp_path / "out", names, range(1, 4))
    torn.write_bytes(torn.read_bytes()[:100])
    found, _ = find_newest("out/*.pt", str(tmp_path))
    assert {Path(one.path).name for one in found} == {"lora-rank16_3.pt", "optim-rank16_3.pt"}


@pytest.mark.parametrize(
    ("pointer", "name", "said"),
    [
        ("last_checkpoint", "model_{:07d}.pth", "model_0000002.pth"),
        ("latest_checkpointed_iteration.txt", "iter_{:07d}", "2"),
        ("LATEST.txt", "epoch_0_step_{}", "epoch_0_step_2"),
    ],
)
def test_a_pointer_in_a_folder_behind_a_link_names_a_checkpoint(
    tmp_path: Path, pointer: str, name: str, said: str
) -> None:
    """It named itself, and Megatron-LM began at iteration 0."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "out").symlink_to("scratch")
    for step in (1, 2):
        path = tmp_path / "out" / name.format(step)
        save_torch(path if path.suffix else path / "model.pt", step)
    (tmp_path / "out" / pointer).write_text(said.replace("2", "3"))
    (torn,), whole = find_newest(f"out/{name.partition('{')[0]}*", str(tmp_path))
    set_aside(torn.path, choose_place(torn.path, str(tmp_path / "out"), str(tmp_path)), whole.path)
    assert (tmp_path / "out" / pointer).read_text() == said


@pytest.mark.parametrize("best", [(0, 2), (1,)])
def test_files_that_are_not_always_saved_together_are_no_pair(
    tmp_path: Path, best: tuple[int, ...]
) -> None:
    """A best one is whole by itself."""
    out = tmp_path / "out"
    save_pairs(out, ["every_{}.pt"], range(best[-1] + 1))
    for step in best:
        save_torch(out / f"best_{step}.pt", step)
    torn = out / f"every_{best[-1]}.pt"
    torn.write_bytes(torn.read_bytes()[:100])
    assert list_names(find_newest("out/*.pt", str(tmp_path))) == ({torn.name}, best[-1])


@pytest.mark.parametrize("names", [["ba{}-rank0.pt", "ba{}-rank1.pt"], PAIRS["VITS"]])
def test_each_file_of_a_step_has_a_link_of_its_own(tmp_path: Path, names: list[str]) -> None:
    out = tmp_path / "out"
    for step in (4, 5):
        for number, name in enumerate(names):
            save_torch(out / name.format(step), step)
            link = out / f"latest-{number}"
            link.unlink(missing_ok=True)
            link.symlink_to(name.format(step))
    file = out / names[0].format(5)
    file.write_bytes(file.read_bytes()[:100])
    torn, whole = find_newest("out/*[45]*", str(tmp_path))
    for one in torn:
        set_aside(one.path, choose_place(one.path, str(out), str(tmp_path)), whole.path)
    for number, name in enumerate(names):
        assert os.readlink(out / f"latest-{number}") == name.format(4)


def test_a_shard_takes_the_place_of_its_own_kind(tmp_path: Path) -> None:
    out = tmp_path / "out"
    paths = [out / f"ckpt{step}-shard{shard}.pt" for step in (1, 2) for shard in (0, 1)]
    for path in paths:
        save_torch(path, 0)
    last = out / "ckpt_last-shard1.pt"
    for whole in paths[2:]:
        assert find_stand_in(str(whole), str(last)) == str(out / "ckpt2-shard1.pt")
    assert find_stand_in(str(out / "ckpt-2.pt"), str(last)) == ""
    assert find_stand_in(str(paths[0]), str(out / "last.pt")) == ""


def test_half_a_folder_is_not_whole(tmp_path: Path) -> None:
    """The save of a folder goes on, or a kill came between two of its files."""
    out = tmp_path / "out"
    for step in (1, 2):
        save_tensors(out / str(step) / "model.safetensors", step)
        save_torch(out / str(step) / "optimizer.pt", step)
        save_torch(out / str(step) / f"rng-{step}.pt", step)
    assert find_newest("out/*", str(tmp_path))[1].step == 2
    (out / "2" / "optimizer.pt").unlink()
    torn, whole = find_newest("out/*", str(tmp_path))
    assert not torn
    assert (whole.step, examine(str(out / "2"), [str(out / "1")]).why) == (
        1,
        "optimizer.pt is missing, which all older ones have",
    )
