import random

import pytest

from perdure.model.errors import ConfigError

torch = pytest.importorskip("torch")

from torch.utils.data import IterableDataset  # noqa: E402

from perdure.worker.data import Plan, SampleOrder, open_batches  # noqa: E402

pytestmark = pytest.mark.torch


class Noisy:
    def __init__(self, length=10):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index, float(torch.rand(())) + random.random()


def take(dataset=None, **changes):
    options = {
        "batch_size": 2, "start": 0, "stop": 6, "rank": 0, "world_size": 1, "shuffle": True,
        "seed": 3, "accumulate": 1, "num_workers": 0, "collate_fn": list,
    } | changes  # fmt: skip
    return list(open_batches(Noisy() if dataset is None else dataset, **options))


def indices(batches):
    return [index for batch in batches for index, _ in batch]


def test_each_pass_uses_every_sample_once_and_in_another_order():
    used = indices(take(stop=10))
    assert sorted(used[:10]) == sorted(used[10:]) == list(range(10))
    assert used[:10] != used[10:]


def test_resumed_anywhere_the_rest_is_the_same_with_its_noise():
    whole = take(stop=20)
    for start in (1, 7, 19):
        assert take(start=start, stop=20) == whole[start:]


def test_loader_workers_change_nothing():
    assert take(num_workers=2) == take()


def test_ranks_share_a_step_without_overlap_whatever_their_number():
    alone = take(batch_size=4)
    shares = [take(rank=rank, world_size=2) for rank in range(2)]
    together = [a + b for a, b in zip(*shares, strict=True)]
    assert together == alone


def test_accumulation_only_groups():
    flat = take(stop=6)
    grouped = take(stop=3, accumulate=2)
    assert [batch for step in grouped for batch in step] == flat


def test_the_trainings_own_randomness_is_untouched():
    torch.manual_seed(5)
    random.seed(5)
    take()
    after = (torch.rand(()), random.random())
    torch.manual_seed(5)
    random.seed(5)
    assert after == (torch.rand(()), random.random())


def test_without_shuffle_the_order_is_the_datasets():
    assert [SampleOrder(3, seed=0, shuffle=False)[k] for k in range(5)] == [0, 1, 2, 0, 1]


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dataset": Endless()}, "cannot be positioned"),
        ({"sampler": [1]}, "sampler is decided by"),
        ({"dataset": Noisy(0)}, "empty"),
        ({"batch_size": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_positioned_is_refused_with_the_reason(changes, why):
    with pytest.raises(ConfigError, match=why):
        take(**changes)


def resume(length, batch, *, was):
    """Return the plan of a run that goes on where `was` has stopped."""
    plan = Plan(length, seed=3, shuffle=True, batch=batch)
    plan.load_state_dict(was.state_dict())
    return plan


def begin(length=10, batch=2, *, samples):
    plan = Plan(length, seed=3, shuffle=True, batch=batch)
    plan.samples = samples
    return plan


def test_another_batch_size_skips_and_repeats_no_sample():
    before = indices(take(stop=3))
    plan = resume(10, 4, was=begin(samples=6))
    assert plan.why_not_exact == "the number of samples in a step was 2, is 4"
    after = indices(take(batch_size=4, start=3, stop=4, plan=plan))
    assert sorted(before + after) == list(range(10))


@pytest.mark.parametrize("used", range(2, 20, 2))
def test_a_dataset_that_has_grown_is_whole_from_the_next_pass_on(used):
    before = indices(take(stop=used // 2))
    plan = resume(14, 2, was=begin(samples=used))
    assert plan.why_not_exact == "the length of the dataset was 10, is 14"
    after = indices(take(Noisy(14), start=used // 2, stop=30, plan=plan))
    rest = -used % 10
    assert sorted(before + after[:rest]) == sorted([*range(10)] * ((used + rest) // 10))
    assert sorted(after[rest : rest + 14]) == list(range(14))
    plan.samples = used + 10
    assert indices(take(Noisy(14), stop=5, plan=resume(14, 2, was=plan))) == after[10:20]


def test_a_dataset_that_has_shrunk_begins_a_pass_at_once():
    plan = resume(6, 2, was=begin(samples=4))
    assert sorted(indices(take(Noisy(6), stop=3, plan=plan))) == list(range(6))
