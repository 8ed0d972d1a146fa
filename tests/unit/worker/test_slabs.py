"""Places in large blocks: what lies in them, what they take, and what goes."""

import io
import itertools
import weakref

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor  # noqa: E402

from perdure.worker.checkpoint import slabs as module  # noqa: E402
from perdure.worker.checkpoint.slabs import ALIGN, Slabs, plan_slabs  # noqa: E402

pytestmark = pytest.mark.torch

TYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.bool, torch.complex64, torch.complex128, torch.int8, torch.int64, torch.float64,
]  # fmt: skip


class Memory:
    """What makes blocks, and knows which of them live."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.living = 0
        self.most = 0
        self.full = False

    def make(self, size: int) -> Tensor:
        if self.full:
            raise RuntimeError("no memory")
        self.made.append(size)
        self.living += size
        self.most = max(self.most, self.living)
        block = torch.empty(size, dtype=torch.uint8)
        weakref.finalize(block, self._free, size)
        return block

    def _free(self, size: int) -> None:
        self.living -= size


@given(
    st.lists(st.integers(0, 5 << 28) | st.integers(0, 9000), max_size=60),
    st.lists(st.integers(20, 31).map(lambda bits: 1 << bits), max_size=4),
)
def test_places_share_nothing_and_take_no_more_than_blocks_of_their_own(
    sizes: list[int], blocks: list[int]
) -> None:
    plan = plan_slabs(sizes, blocks)
    taken: dict[int, list[tuple[int, int]]] = {}
    for size, (block, offset) in zip(sizes, plan.places, strict=True):
        if size:
            assert offset % ALIGN == 0
            assert offset + size <= plan.blocks[block]
            taken.setdefault(block, []).append((offset, offset + size))
    for rows in taken.values():
        rows.sort()
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(rows))
    assert set(taken) == set(range(len(plan.blocks))), "each block is used"
    assert all(size & (size - 1) == 0 for size in plan.blocks)
    alone = sum(1 << (max(size, ALIGN) - 1).bit_length() for size in sizes if size)
    assert sum(plan_slabs(sizes).blocks) <= alone + (1 << 20)


def make_states() -> dict[str, Tensor]:
    torch.manual_seed(3)
    state = {str(dtype): torch.randint(0, 2, (37, 5)).to(dtype) for dtype in TYPES}
    state["scalar"] = torch.tensor(2.5)
    state["empty"] = torch.empty(0, 7)
    state["transposed"] = torch.randn(70, 90).t()
    state["strided"] = torch.randn(64, 64)[::2, 1::3]
    state["channels last"] = torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
    state["expanded"] = torch.randn(3, 1).expand(3, 9)
    state["conjugated"] = torch.randn(4, 4, dtype=torch.complex64).conj()
    state["alias"] = state["scalar"]
    state["large"] = torch.randn(1_000_000)
    state["larger"] = torch.randn(600_000, dtype=torch.float64)
    return state


def same_bits(one: Tensor, other: Tensor) -> bool:
    one, other = (t.resolve_conj().contiguous().reshape(-1) for t in (one, other))
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_every_kind_of_tensor_is_there_to_the_bit_and_alone_in_its_storage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_BLOCK_MIN", 1 << 12)
    monkeypatch.setattr(module, "_BLOCK_MAX", 1 << 16)  # `large` does not fit into that.
    memory, state = Memory(), make_states()
    places = Slabs(memory.make).fit(state)
    for key, source in state.items():
        places[key].copy_(source)
    assert sorted(memory.made) == [4 << 20, 8 << 20]
    for key, source in state.items():
        place = places[key]
        assert place.shape == source.shape
        assert place.is_contiguous()
        assert place.data_ptr() % ALIGN == 0
        assert same_bits(place, source), key
        assert place.untyped_storage().nbytes() == place.nbytes
    file = io.BytesIO()
    torch.save(places, file)
    assert file.tell() < 2 * sum(value.nbytes for value in state.values()), "a block was written"


def test_places_are_the_same_while_the_layout_is() -> None:
    memory = Memory()
    slabs = Slabs(memory.make)
    first = slabs.fit({"a": torch.ones(9), "b": torch.ones(5)})
    again = slabs.fit({"b": torch.zeros(5), "a": torch.zeros(9)})
    assert all(again[key] is first[key] for key in "ab")
    assert memory.made == [1 << 20]
    for changed in (torch.zeros(6), torch.zeros(5, dtype=torch.int32)):
        place = slabs.fit({"a": torch.zeros(9), "b": changed})["b"]
        assert (place.shape, place.dtype) == (changed.shape, changed.dtype)
    assert memory.made == [1 << 20], "there was room in what was there"


def test_fifty_layouts_leave_no_more_than_the_largest_needs() -> None:
    memory = Memory()
    slabs = Slabs(memory.make)
    for number in range(50):
        width = (number * 37) % 50 + 1
        state = {f"{number}.{n}": torch.full((width, 20_000), float(number)) for n in range(4)}
        places = slabs.fit(state)
        for key, value in state.items():
            places[key].copy_(value)
        assert all(torch.equal(places[key], value) for key, value in state.items())
        del places
        needed = sum(value.nbytes for value in state.values())
        assert memory.living == slabs.nbytes <= 2.5 * needed + (1 << 20)
    assert memory.most <= 2.5 * 4 * 50 * 20_000 * 4


def test_a_state_that_grows_by_its_moments_keeps_the_blocks_that_it_has() -> None:
    memory = Memory()
    slabs = Slabs(memory.make)
    state = {str(n): torch.ones(1 << 20) for n in range(4)}
    slabs.fit(state)
    first = list(memory.made)
    slabs.fit({**state, **{f"{n}.moment": torch.ones(1 << 20) for n in range(8)}})
    assert memory.living == sum(memory.made) == slabs.nbytes == 48 << 20
    assert memory.made[: len(first)] == first


def test_memory_that_is_not_there_is_asked_for_again() -> None:
    memory = Memory()
    slabs = Slabs(memory.make)
    memory.full = True
    state = {"a": torch.ones(9)}
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no memory"):
            slabs.fit(state)
    memory.full = False
    slabs.fit(state)["a"].copy_(state["a"])
    assert memory.living == slabs.nbytes == 1 << 20
