"""What torch's NCCL is told before an elastic world's first group, and what a rank says of it."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from perdure.model.nccl import ELASTIC, SUPERVISED, mark_defaults
from perdure.worker import attach
from perdure.worker.elastic.membership import Membership
from perdure.worker.elastic.survival import outlive_errors


def begin_elastic(own: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    told: list[str] = []
    env = own | mark_defaults(own, SUPERVISED)
    outlive_errors(env, told.append)
    return {name: env[name] for name in ELASTIC if name in env}, told


def test_survivors_outlive_what_a_restarted_job_would_not() -> None:
    assert begin_elastic({}) == (ELASTIC, [])
    assert ELASTIC["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, "ends the survivors"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}, "ends the survivors"),
        ({"TORCH_NCCL_RETHROW_CUDA_ERRORS": "yes"}, "ends the survivors"),
        ({"TORCH_NCCL_NONBLOCKING_TIMEOUT": "1800"}, "so many seconds"),
        ({"NCCL_NVLS_ENABLE": "2"}, "NVLink SHARP"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, ""),
        ({"TORCH_NCCL_ENABLE_MONITORING": "False"}, ""),
        ({"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}, ""),
        ({"TORCH_NCCL_NONBLOCKING_TIMEOUT": "30"}, ""),
    ],
)
def test_the_user_s_own_value_stays_and_is_named_where_it_breaks(
    own: dict[str, str], said: str
) -> None:
    env, told = begin_elastic(own)
    assert env == ELASTIC | own
    assert len(told) == bool(said)
    assert all(said in line and "=".join(next(iter(own.items()))) in line for line in told)


def test_a_former_name_is_the_user_s_value_too() -> None:
    env, (told,) = begin_elastic({"NCCL_ASYNC_ERROR_HANDLING": "1"})
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in env
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING=1" in told


def test_outside_of_perdure_s_jobs_nothing_is_set() -> None:
    env = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    outlive_errors(env, pytest.fail)
    assert env == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


def test_a_member_says_it_before_it_has_a_group(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    for name in (*ELASTIC, "PERDURE_NCCL_DEFAULTS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (own | mark_defaults(own, SUPERVISED)).items():
        monkeypatch.setenv(name, value)
    for name in set(ELASTIC) - set(SUPERVISED):
        monkeypatch.setenv(name, "")  # So that it is as before in the end.
        monkeypatch.delenv(name)
    Membership(None)
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING=3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("backend", "size", "env", "told"),
    [
        ("nccl", 4, {}, True),
        ("nccl", 2, {}, False),
        ("cpu:gloo,cuda:nccl", 4, {}, False),
        ("gloo", 4, {}, False),
        ("nccl", 4, {"LOCAL_RANK": "1"}, False),
        ("nccl", 4, {"NCCL_HOSTID": "r0"}, False),
        ("nccl", 8, {"LOCAL_WORLD_SIZE": "2"}, False),
    ],
)
def test_a_group_of_more_ranks_than_gpus_is_told_once(
    backend: str, size: int, env: dict[str, str], told: bool,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name in ("NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"} | env).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    attach._warn_shared_gpus(SimpleNamespace(size=lambda: size))
    said = capsys.readouterr().err
    assert ("4 ranks share 2 visible GPUs, and NCCL refuses" in said) == told
    assert told or not said
