"""Whom an exit blames, by what a rank said when it ended."""

import pytest

from perdure.model.failures import ExitRecord, explain_exit

TORCH = "/usr/lib/python3/site-packages/torch/distributed"
FORMING = f"""Traceback (most recent call last):
  File "train.py", line 8, in <module>
    dist.init_process_group("gloo")
  File "{TORCH}/distributed_c10d.py", line 1899, in init_process_group
    default_pg, _ = _new_process_group_helper(
"""
INSIDE = f"""  File "{TORCH}/distributed_c10d.py", line 2169, in _new_process_group_helper
    backend_class = ProcessGroupGloo(
                    ^^^^^^^^^^^^^^^^^
"""
RAISED = f"""  File "{TORCH}/distributed_c10d.py", line 2100, in _new_process_group_helper
    raise ValueError("no such backend")
"""
TRAINING = f"""Traceback (most recent call last):
  File "train.py", line 11, in <module>
    dist.all_reduce(values)
  File "{TORCH}/distributed_c10d.py", line 3000, in all_reduce
    work.wait()
"""
CLOSED = (
    "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed."
)

RESET = "[c10d] recv failed on the socket: Connection reset by peer\n"
"""What torch may write while members end by the same error."""


@pytest.mark.parametrize(
    ("traceback", "error", "culprit"),
    [
        (FORMING + INSIDE, CLOSED, "a connection of rank 1"),
        (TRAINING, CLOSED, "a connection of rank 1"),
        (FORMING + INSIDE, "MemoryError: std::bad_alloc", "the rendezvous of rank 1"),
        (FORMING + INSIDE, "RuntimeError: CUDA error: invalid device ordinal", "rank 1"),
        (FORMING + RAISED, "ValueError: no such backend", "rank 1"),
        (TRAINING, "MemoryError: std::bad_alloc", "rank 1"),
        ("", "ValueError: bad lr", "rank 1"),
        ("", "perdure.model.errors.DifferError: elastic: members differ: w", "the world"),
        (RESET, "perdure.model.errors.DifferError: elastic: members differ: w", "the world"),
        ("", "__main__.SchemaDifferError: elastic: columns", "rank 1"),
        ("", "DifferError: columns", "rank 1"),
        ("", "DifferError", "rank 1"),
    ],
)
def test_whom_an_exit_blames(traceback: str, error: str, culprit: str) -> None:
    """A stranger may have written into the store at which ranks meet: no rank is blamed for it."""
    record = ExitRecord(1, 0, 10, 2.0, code=1, traceback=f"{traceback}{error}\n", error=error)
    assert explain_exit(record, 2.0, -1, None).culprit == culprit


def test_no_rank_is_blamed_for_the_connections_of_a_stranger() -> None:
    words = "  what():  [enforce fail at gloo/listener.cc:63] false. accept: Too many open files"
    record = ExitRecord(1, 0, 10, 2.0, signal=6, last_output=("terminate called", words))
    assert explain_exit(record, 2.0, -1, None).culprit == "the port of rank 1"
