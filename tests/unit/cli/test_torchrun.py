"""torchrun's options: same, accepted or refused, as docs/torchrun.md says."""

import os

import pytest

from perdure.cli.running.torchrun import (
    list_rdzv_notes,
    list_visible_gpus,
    parse_nnodes,
    parse_nproc,
    parse_ranks,
    parse_streams,
)
from perdure.model.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "numbers"), [("1", (1, 1)), ("1:1", (1, 1)), ("3", (3, 3)), ("1:4", (1, 4))]
)
def test_numbers_of_nodes(text: str, numbers: tuple[int, int]) -> None:
    assert parse_nnodes(text) == numbers


@pytest.mark.parametrize("text", ["", "0", "x", "3:1", "1:2:3", "-1"])
def test_nonsense_nnodes(text: str) -> None:
    with pytest.raises(ConfigError, match="neither N nor MIN:MAX"):
        parse_nnodes(text)


def test_nproc(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    cpus = len(os.sched_getaffinity(0))
    assert parse_nproc("3", {}) == 3
    assert parse_nproc("cpu", {}) == parse_nproc("auto", {}) == cpus
    with pytest.raises(ConfigError, match="no GPU is visible"):
        parse_nproc("gpu", {})
    for text in ("0", "-2", "many", ""):
        with pytest.raises(ConfigError, match="not a number of ranks"):
            parse_nproc(text, {})


def test_gpus_as_cuda_would_see_them(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-aa11'\necho '1, GPU-bb22'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert list_visible_gpus({}) == ("GPU-aa11", "GPU-bb22")
    assert list_visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}) == ("GPU-bb22",)
    assert list_visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-bb,0"}) == ("GPU-bb22", "GPU-aa11")
    assert list_visible_gpus({"CUDA_VISIBLE_DEVICES": "0,9,1"}) == ("GPU-aa11",)
    assert list_visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()
    assert parse_nproc("auto", {}) == parse_nproc("gpu", {}) == 2


def test_rendezvous_here_is_said_elsewhere_is_refused() -> None:
    assert list_rdzv_notes({"--rdzv-backend": None, "--node-rank": "0"}) == []
    (note,) = list_rdzv_notes({"--rdzv-backend": "c10d", "--rdzv-endpoint": "localhost:0"})
    assert note.startswith("--rdzv-backend, --rdzv-endpoint ignored")
    for options in (
        {"--rdzv-endpoint": "node7:29500"},
        {"--master-addr": "10.0.0.7"},
        {"--node-rank": "1"},
    ):
        with pytest.raises(ConfigError, match=r"this machine"):
            list_rdzv_notes(options)


def test_streams_and_ranks() -> None:
    assert parse_streams("--tee", "3", 2) == {0: 3, 1: 3}
    assert parse_streams("--tee", "1:2", 2) == {0: 0, 1: 2}
    for text in ("4", "0:5", "x", "0"[:0]):
        with pytest.raises(ConfigError, match=r"--tee"):
            parse_streams("--tee", text, 2)
    assert parse_ranks("--rank", "0, 2") == {0, 2}
    with pytest.raises(ConfigError):
        parse_ranks("--rank", "0,a")
