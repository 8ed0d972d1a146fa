"""Which open files are checkpoints that are being written."""

import os
from pathlib import Path

import pytest

from perdure.keeper.writers import QUIET_S, Save, is_checkpoint, list_written


@pytest.mark.parametrize(
    "path",
    [
        "/run/model.pt", "/run/model.pt.tmp", "/run/checkpoint-120/optimizer.pt",
        "/run/checkpoint-120/model.safetensors", "/run/out/__0_0.distcp", "/run/ckpt",
        "/run/global_step40/mp_rank_00_model_states.pt", "/run/epoch=3-step=40.ckpt",
        "/run/checkpoints/tmpab12cd", "/run/checkpoint-120/trainer_state.json",
    ],
)  # fmt: skip
def test_checkpoints(path: str) -> None:
    assert is_checkpoint(path)


@pytest.mark.parametrize(
    "path",
    [
        "/run/train.log", "/run/events.out.tfevents.1.host.2.0", "/run/checkpoint/train.log",
        "/run/wandb/run-1/model.bin", "/run/metrics.jsonl", "/run/metrics.json",
        "/dev/shm/torch_1_2.pt",
        "/job/checkpoints/step-00000050.g0.1.tmp/__0_0.distcp", "socket:[123]", "/run/notes",
    ],
)  # fmt: skip
def test_other_files(path: str) -> None:
    assert not is_checkpoint(path)


def test_a_file_that_is_written(tmp_path: Path) -> None:
    with open(tmp_path / "model.pt", "wb") as file:
        file.write(b"half")
        file.flush()
        assert list_written(os.getpid()) == {str(tmp_path / "model.pt"): 4}
        old_s = os.stat(file.fileno()).st_mtime - 2 * QUIET_S
        os.utime(file.fileno(), (old_s, old_s))
        assert list_written(os.getpid()) == {}, "it does not grow"
    assert list_written(os.getpid()) == {}, "it is whole"


def test_files_that_are_read_or_appended_to(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"whole")
    with open(tmp_path / "model.pt", "rb"), open(tmp_path / "loss.bin", "ab"):
        assert list_written(os.getpid()) == {}


def feed(*looks: list[tuple[str, int]]) -> list[bool]:
    """Return what a rank's looks, 0.25 s apart, say of its save."""
    save = Save()
    return [save.take(dict(files), 0.25 * n) for n, files in enumerate(looks)]


def test_a_rank_that_saves_again_at_once_is_done_with_a_save() -> None:
    first, second = [("/r/ckpt-8.pt", 5)], [("/r/ckpt-9.pt", 5)]
    assert feed(first, first, [], second, second, []) == [False] * 5 + [True]
    assert feed(first, second, [("/r/ckpt-10.pt", 1)], []) == [False] * 3 + [True]


def test_an_overwritten_file_is_done_once_it_was_begun_again_and_closed() -> None:
    looks = [[("/r/ckpt.pt", at)] for at in (5, 9, 2, 7)]
    assert feed(*looks, []) == [False] * 4 + [True]


def test_all_files_of_a_folder_belong_to_one_save() -> None:
    def folder(step: int, *names: str) -> list[tuple[str, int]]:
        return [(f"/r/checkpoint-{step}/{name}", 5) for name in names]

    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    looks = [folder(8, shards[1]), folder(8, "optimizer.pt"), [], folder(9, shards[0])]
    looks += [folder(9, shards[1]), [], folder(9, "optimizer.pt"), [], [], []]
    assert feed(*looks) == [False] * 8 + [True, True], "a little later, for what is no tensor"
    looks = [folder(n, name) for n in (8, 9, 10) for name in ("a.pt", "trainer_state.json")]
    assert feed(*looks)[:5] == [False] * 4 + [True], "the next save has begun meanwhile"


def test_a_save_of_several_files_beside_one_another_is_not_cut() -> None:
    names = ["/r/model-00001-of-00002.pt", "/r/model-00002-of-00002.pt", "/r/optimizer.pt"]
    assert not any(feed(*([(name, 5)] for name in names), [], []))
