import os

import pytest
from tests.unit.adapters.fake_nvml import FakeNvml

from perdure.adapters import box
from perdure.adapters.devices import Nvml, list_device_ids, read_machine_id
from perdure.adapters.host import list_ancestors
from perdure.model.job import JobSpec


def gpu(uuid, **more):
    return {"uuid": uuid, "name": "H200", "rows": [0, 2, 1, 0], "ecc": [5, 1], "throttle": 4,
            "clock": 1500, "clock_max": 1980, "power_mw": 650_000, "limit_mw": 700_000,
            "temperature": 61, "memory": (7, 9), **more}  # fmt: skip


def test_counters_ranks_and_errors():
    fake = FakeNvml(gpu("GPU-a", pids=[11, 70]), gpu("GPU-b", pids=[70]))
    nvml = Nvml(fake, {}, clock=lambda: 100.0)
    fake.xids = [(1, 79)]
    # 70 is a child of rank 1's process 12, and uses both devices.
    a, b = nvml.sample(lambda pid: [12, 1] if pid == 70 else [1], {0: 11, 1: 12}, 5.0)
    assert (a.device, a.ranks, b.ranks) == ("GPU-a", (0, 1), (1,))
    assert (a.ecc_corrected, a.ecc_uncorrected, a.remapped_rows, a.remap_pending) == (5, 1, 2, True)
    assert (a.sm_clock_mhz, a.sm_clock_max_mhz, a.power_w) == (1500, 1980, 650.0)
    assert (a.retired_pages, a.temperature_c, a.memory_bytes, a.throttle) == (-1, 61, 7, 4)
    assert [(x.code, x.at_s) for x in b.xids] == [(79, 105.0)]
    assert a.xids == ()
    assert nvml.sample(lambda pid: [], {})[1].xids  # Still, so that a lost heartbeat loses none.


def test_a_device_that_left_the_bus_is_still_told_of():
    fake = FakeNvml(gpu("GPU-a"))
    nvml = Nvml(fake, {})
    fake.gpus[0]["lost"] = True
    (look,) = nvml.sample(lambda pid: [], {})
    assert look.device == "GPU-a"
    assert look.error.startswith("lost: ")
    assert look.sm_clock_mhz == -1


def test_instances_of_a_divided_gpu_stand_for_it():
    parts = [{"uuid": "MIG-1", "name": "H200 1g"}, {"uuid": "MIG-2", "name": "H200 1g"}]
    nvml = Nvml(FakeNvml(gpu("GPU-a", mig=parts), gpu("GPU-b")), {})
    assert nvml.ids == ("MIG-1", "MIG-2", "GPU-b")
    assert [look.kind for look in nvml.sample(lambda pid: [], {})] == ["mig", "mig", "gpu"]


@pytest.mark.parametrize(
    ("visible", "ids"),
    [
        ("1,0", ("GPU-b", "GPU-a")),
        ("GPU-b", ("GPU-b",)),
        ("0,7,1", ("GPU-a",)),
        ("", ()),
        ("-1", ()),
    ],
)
def test_only_what_cuda_would_show(visible, ids):
    fake = FakeNvml(gpu("GPU-a"), gpu("GPU-b"))
    assert Nvml(fake, {"CUDA_VISIBLE_DEVICES": visible}).ids == ids


def test_slots_have_ids_that_stay():
    spec = JobSpec(script="s.py", nproc=3, nodes=2)
    ids = list_device_ids(spec, 0, ()) + list_device_ids(spec, 1, ())
    assert len(set(ids)) == 6
    assert ids == list_device_ids(spec, 0, ()) + list_device_ids(spec, 1, ())
    assert all(read_machine_id() in device for device in ids)
    assert list_device_ids(spec, 1, ("GPU-a", "GPU-b")) == ("GPU-b", "GPU-a", "GPU-b")


def test_ancestors_of_a_process():
    assert list_ancestors(os.getpid())[0] == os.getppid()
    assert list_ancestors(999_999_999) == []


def test_a_machines_facts_leave_out_the_processes_of_a_divided_gpu(monkeypatch):
    parts = [{"uuid": "MIG-1", "name": "H200 1g"}, {"uuid": "MIG-2", "name": "H200 1g"}]
    divided = {"uuid": "GPU-a", "name": "H200", "mig": parts}  # It does not say what is in use.
    fake = FakeNvml(divided, gpu("GPU-b", pids=[7]))
    monkeypatch.setattr(box, "load_nvml", lambda: fake)
    found, driver = box.read_gpus()
    assert [one.pids for one in found] == [(), (7,)]
    assert (driver, fake.open) == ("13.0", 0)
