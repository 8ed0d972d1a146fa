"""What can be said of NCCL's communicator without a GPU: the rest is `tests/contract`'s."""

import threading
from typing import Any

import pytest
from tests.waiting import PATIENCE_S

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from perdure.worker.elastic.apart import Broken
from perdure.worker.elastic.communicators import nccl
from perdure.worker.elastic.communicators.nccl import NcclComm

pytestmark = pytest.mark.torch


class Backend:
    """A backend whose abort takes until it is let go, and whose operations then end."""

    def __init__(self) -> None:
        self.let_go, self.aborted, self.error = threading.Event(), threading.Event(), ""

    def allreduce(self, tensors: Any) -> Any:
        return self

    def abort(self) -> None:
        self.let_go.wait(PATIENCE_S)
        self.aborted.set()

    def query(self) -> bool:
        """Answer as the event behind an operation does."""
        if self.error:
            raise RuntimeError(self.error)
        return self.aborted.is_set()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    monkeypatch.setattr(nccl, "follow", lambda work, stream: work)
    return Backend()


def test_a_break_does_not_wait_for_the_abort_and_draining_does(backend: Backend) -> None:
    comm = NcclComm(backend, None)
    ticket = comm.all_reduce(torch.ones(1))
    comm.break_()
    comm.break_()
    assert comm.poll(ticket) == "running"
    assert not backend.aborted.is_set()
    assert not comm.drained(0.05)
    with pytest.raises(Broken):
        comm.all_reduce(torch.ones(1))
    backend.let_go.set()
    assert comm.drained(PATIENCE_S)
    assert comm.poll(ticket) == "done"


def test_a_failed_call_of_cuda_loses_the_device(backend: Backend) -> None:
    comm = NcclComm(backend, None)
    ticket = comm.all_reduce(torch.ones(1))
    backend.error = "CUDA error: an illegal memory access was encountered"
    assert (comm.poll(ticket), ticket.error) == ("failed", backend.error)
    backend.let_go.set()
    comm.break_()
    assert not comm.drained(PATIENCE_S)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch was built without NCCL")
def test_torch_has_what_is_asked_of_it() -> None:
    backend: Any = vars(dist)["ProcessGroupNCCL"]
    options = backend.Options()
    options.config.blocking = 0
    options._timeout, options.group_name = nccl._WHOLE, "perdure-1"
    assert (options.config.blocking, options._timeout) == (0, nccl._WHOLE)
    for name in (
        "abort", "eager_connect_single_device", "allreduce", "broadcast", "_allgather_base",
        "send", "recv",
    ):  # fmt: skip
        assert callable(getattr(backend, name)), name
