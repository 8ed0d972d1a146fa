"""Which open files are checkpoints that are being written."""

import os
from pathlib import Path

import pytest

from perdure.keeper.writers import QUIET_S, is_checkpoint, list_written


@pytest.mark.parametrize(
    "path",
    [
        "/run/model.pt", "/run/model.pt.tmp", "/run/checkpoint-120/optimizer.pt",
        "/run/checkpoint-120/model.safetensors", "/run/out/__0_0.distcp", "/run/ckpt",
        "/run/global_step40/mp_rank_00_model_states.pt", "/run/epoch=3-step=40.ckpt",
        "/run/checkpoints/tmpab12cd",
    ],
)  # fmt: skip
def test_checkpoints(path: str) -> None:
    assert is_checkpoint(path)


@pytest.mark.parametrize(
    "path",
    [
        "/run/train.log", "/run/events.out.tfevents.1.host.2.0", "/run/checkpoint/train.log",
        "/run/wandb/run-1/model.bin", "/run/metrics.jsonl", "/dev/shm/torch_1_2.pt",
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
