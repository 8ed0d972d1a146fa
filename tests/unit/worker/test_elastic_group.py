"""How the end of a collective is seen."""

import pytest

pytest.importorskip("torch")

from perdure.worker.elastic.group import Broken, Group

pytestmark = pytest.mark.torch


class Late:
    """A collective that ends in between: after a look, and before it is asked whether it has."""

    def __init__(self, error: str = "") -> None:
        self.error = error

    def wait(self, timeout: object = None) -> bool:
        if timeout is not None:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return True


def wait_for(work: Late) -> None:
    group = Group((0,), 0, None, None)
    group._works = [(work, False)]
    group.wait()


def test_one_that_ends_well_between_two_looks_is_no_failure() -> None:
    wait_for(Late())


def test_one_that_fails_between_two_looks_tells_its_own_error() -> None:
    with pytest.raises(Broken, match="reset by peer"):
        wait_for(Late("Connection reset by peer"))
