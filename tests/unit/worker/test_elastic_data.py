"""Which samples a micro-batch has."""

import pytest

torch = pytest.importorskip("torch")

from perdure.model.errors import ConfigError  # noqa: E402
from perdure.plan.elastic.microbatches import plan_batches  # noqa: E402
from perdure.worker.data import MicroBatches  # noqa: E402

pytestmark = pytest.mark.torch
PLAN = plan_batches(6, 2)


class Stream:
    """Without a length: its sample at a position is the position, and a random number."""

    def __getitem__(self, position):
        return position, torch.rand(())


class Short(Stream):
    def __len__(self):
        return 4


def load_all(dataset, steps):
    data = MicroBatches(dataset, PLAN, seed=1, shuffle=True)
    return [data.load(step, m) for step in range(steps) for m in range(PLAN.count)]


def test_a_stream_gives_its_samples_one_after_another():
    positions = torch.cat([batch[0] for batch in load_all(Stream(), 5)])
    assert positions.tolist() == list(range(30))


def test_a_micro_batch_that_is_loaded_again_is_the_same():
    data = MicroBatches(Stream(), PLAN, seed=1, shuffle=True)
    first = data.load(2, 1)
    data.load(7, 0)
    again = data.load(2, 1)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


def test_a_dataset_with_a_length_is_passed_through_whole_and_shuffled_anew():
    indices = torch.cat([batch[0] for batch in load_all(Short(), 2)]).tolist()
    passes = [indices[i : i + 4] for i in range(0, 12, 4)]
    assert all(sorted(one) == [0, 1, 2, 3] for one in passes)
    assert len({tuple(one) for one in passes}) > 1


def test_what_cannot_be_given_again_is_refused():
    with pytest.raises(ConfigError, match="no samples by index"):
        MicroBatches(iter([1, 2]), PLAN, seed=1, shuffle=True)
    with pytest.raises(ConfigError, match="empty"):
        MicroBatches([], PLAN, seed=1, shuffle=True)
