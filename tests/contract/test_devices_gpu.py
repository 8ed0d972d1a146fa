"""The real NVML answers what the fake one does."""

import os

import pytest

from perdure.adapters.devices import Nvml, list_gpus
from perdure.adapters.host import list_ancestors

pytestmark = pytest.mark.gpu


@pytest.fixture
def nvml():
    found = Nvml.open({})
    if found is None:
        pytest.skip("no GPU that NVML shows")
    yield found
    found.close()


def test_real_counters(nvml):
    looks = nvml.sample(list_ancestors, {0: os.getpid()})
    assert [look.device for look in looks] == list(list_gpus({}))
    for look in looks:
        assert look.device.startswith(("GPU-", "MIG-"))
        assert look.error == ""
        assert 0 < look.sm_clock_mhz <= look.sm_clock_max_mhz
        assert 0 < look.power_w < look.power_limit_w * 1.5
        assert 0 < look.temperature_c < 120
        assert look.memory_total_bytes > look.memory_bytes >= 0
