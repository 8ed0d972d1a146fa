"""A start waits for what dead ranks had on a GPU, for no more than that, and never without one."""

import asyncio
import re

import pytest
from tests.unit.adapters.fake_nvml import FakeNvml

from perdure.adapters.devices import Nvml
from perdure.service.agent import memory
from perdure.service.agent.memory import MemoryWatch

GIB = 1 << 30


def watch(fake, parents=lambda pid: []):
    return MemoryWatch(Nvml(fake, {}), parents)


def gpu(uuid="GPU-a", used=11 * GIB, **sizes):
    pids = {int(pid[1:]): size for pid, size in sizes.items()}
    return {"uuid": uuid, "memory": (used, 80 * GIB), "sizes": pids}


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Nobody waits for as long as this, so that only free memory ends a wait."""
    monkeypatch.setattr(memory, "WAIT_S", 3600.0)


def count_looks(found):
    """Return a list that gets longer with each look of `found` at what the dead have."""
    looks, measure = [], found._measure

    def count(*args):
        looks.append(args)
        return measure(*args)

    found._measure = count
    return looks


def test_nobody_waits_without_a_gpu_or_where_memory_is_hidden():
    assert MemoryWatch(None).list_dead(()) == {}
    hidden = {"uuid": "GPU-a", "memory": (11 * GIB, 80 * GIB), "pids": [7]}
    mute = {"uuid": "GPU-b", "memory": (11 * GIB, 80 * GIB), "sizes": {}}
    found = watch(FakeNvml(hidden, mute))
    found.look({0: 7})
    assert found.list_dead(()) == {}


def test_who_lives_or_had_little_or_is_in_another_slot_is_not_waited_for():
    found = watch(FakeNvml(gpu(p7=10 * GIB), gpu("GPU-b", p8=GIB), gpu("GPU-c", p9=1 << 20)))
    found.look({0: 7, 1: 8, 2: 9})
    assert found.list_dead({7, 8}) == {}
    assert found.list_dead({7}) == {"GPU-b": {8}}
    assert found.list_dead((), lambda rank: rank == 0) == {"GPU-a": {7}}


def test_memory_that_is_free_is_waited_for_no_longer_and_nothing_is_said():
    fake = FakeNvml(gpu(p7=10 * GIB, p8=0))
    found = watch(fake)
    found.look({0: 7})
    fake.gpus[0].update(gpu(used=21 * GIB, p8=20 * GIB))  # Another's, which came since.
    looks = count_looks(found)
    assert asyncio.run(found.wait(found.list_dead(()))) == ""
    assert len(looks) == 1


@pytest.mark.parametrize("listed", [True, False], ids=["listed still", "of nobody"])
def test_a_start_waits_until_the_dead_one_s_memory_is_free(listed):
    fake = FakeNvml(gpu(p70=10 * GIB, p8=0))
    found = watch(fake, lambda pid: [7] if pid == 70 else [])  # A child of the rank has it.
    found.look({0: 7})
    fake.gpus[0].update(gpu(**({"p70": 10 * GIB} if listed else {})))
    found.look({})  # Between the death and the next start: it forgets nothing.
    dead = found.list_dead(())
    assert dead == {"GPU-a": {70}}

    looks = count_looks(found)

    async def free_later():
        waiting = asyncio.create_task(found.wait(dead))
        while len(looks) < 4 and not waiting.done():  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert not waiting.done()
        fake.gpus[0].update(gpu(used=GIB + memory.FREE_BYTES))
        return await waiting

    said = asyncio.run(free_later())
    assert re.fullmatch(r"waited \d+\.\d\d s for the memory of dead ranks on GPU-a", said)
    assert found.list_dead(()) == {}, "nobody waits for it twice"


def test_memory_that_is_never_free_holds_a_start_up_for_a_while_only(monkeypatch):
    monkeypatch.setattr(memory, "WAIT_S", 0.3)
    found = watch(FakeNvml(gpu(p7=10 * GIB)))
    found.look({0: 7})
    looks = count_looks(found)
    said = asyncio.run(found.wait(found.list_dead(())))
    assert looks
    assert "10.0 GiB of dead ranks are still on GPU-a" in said


def test_a_driver_in_trouble_holds_nobody_up():
    fake = FakeNvml(gpu(p7=10 * GIB))
    found = watch(fake)
    found.look({0: 7})
    fake.gpus[0]["lost"] = True
    assert asyncio.run(found.wait(found.list_dead(()))) == ""
    found.look({0: 7})
