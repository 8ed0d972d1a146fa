"""NVML's real Python bindings, over a library that is played: no GPU is needed.

What a driver really counts, and when, no test without a GPU can say (`test_devices_gpu.py`); what
the bindings make of it, and what perdure makes of that, is the same here as there.
"""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from perdure.adapters import devices
from perdure.adapters.devices import Nvml
from perdure.detect.devices import DeviceJudge
from perdure.model.signals import devices as model
from perdure.model.signals.progress import NodeBeat
from tests.gpu import memory
from tests.waiting import PATIENCE_S

pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")

WELL = {
    "ecc_uncorrected": 0, "ecc_corrected": 0, "remapped": 0, "remap_pending": 0, "remap_failed": 0,
    "double_bit_pages": 0, "reasons": 0, "sm_mhz": 1980, "sm_max_mhz": 1980, "power_mw": 600_000,
    "limit_mw": 700_000, "celsius": 60, "pid": 4242,
}  # fmt: skip
PEAK = WELL | {"reasons": 0x4, "sm_mhz": 1305, "power_mw": 699_000}
"""A GPU at work: its power limit is what bounds its clock."""
HOT = WELL | {"reasons": 0x40 | 0x4, "sm_mhz": 345, "power_mw": 200_000, "celsius": 91}
BRAKE = WELL | {"reasons": 0x8 | 0x80, "sm_mhz": 600, "power_mw": 300_000}
CAPPED = WELL | {"reasons": 0x4, "sm_mhz": 600, "power_mw": 250_000}


def test_every_name_is_one_of_nvmls() -> None:
    text = Path(devices.__file__).read_text()
    names = set(re.findall(r"\bNVML_\w+|\bnvml[A-Z]\w+", text))
    assert len(names) > 20
    assert [name for name in sorted(names) if not hasattr(pynvml, name)] == []


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (model.POWER_CAP, "SwPowerCap"),
        (model.HW_SLOWDOWN, "HwSlowdown"),
        (model.SW_THERMAL, "SwThermalSlowdown"),
        (model.HW_THERMAL, "HwThermalSlowdown"),
        (model.POWER_BRAKE, "HwPowerBrakeSlowdown"),
    ],
)
def test_bits_are_nvmls(ours: int, theirs: str) -> None:
    assert ours == getattr(pynvml, f"nvmlClocksEventReason{theirs}")
    assert ours == getattr(pynvml, f"nvmlClocksThrottleReason{theirs}")


class Gpu:
    """The played GPU, what perdure sees of it, and what it makes of that."""

    def __init__(self, counters: Path) -> None:
        self.counters, self.now = counters, 1000.0
        self.show(WELL)
        nvml = Nvml.open({})
        assert nvml is not None
        self.nvml = nvml
        self.nvml._clock = lambda: self.now
        self.judge = DeviceJudge()

    def show(self, values: dict[str, int]) -> None:
        self.counters.write_text("".join(f"{name} {value}\n" for name, value in values.items()))

    def live(self, values: dict[str, int], looks: int = 1) -> list[tuple[bool, str]]:
        """Return what is reported while the counters are `values` for `looks` of 5 s each."""
        self.show(values)
        found = []
        for _ in range(looks):
            self.now += 5.0
            samples = self.nvml.sample(lambda pid: [], {3: 4242})
            beat = NodeBeat(0, "a", 1, self.now, 0, (), devices=samples)
            for event in self.judge.take_beat(self.now, beat):
                self.judge.note(event)
                found.append((event.healthy, event.reason))
        return found


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("nvml_stub.c")
    command = [compiler, "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    monkeypatch.setenv("NVML_STUB", str(tmp_path / "counters"))
    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(library)))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    found = Gpu(tmp_path / "counters")
    yield found
    found.nvml.close()


def test_a_look_has_every_counter(gpu: Gpu) -> None:
    gpu.show(
        WELL | {"ecc_corrected": 7, "remapped": 2, "double_bit_pages": 3, "xids": 1, "xid": 63}
    )
    (look,) = gpu.nvml.sample(lambda pid: [], {3: 4242})
    assert (look.device, look.name, look.ranks, look.error) == ("GPU-5tub", "Stub", (3,), "")
    assert (look.ecc_uncorrected, look.ecc_corrected, look.retired_pages) == (0, 7, 3)
    assert (look.remapped_rows, look.remap_pending, look.remap_failed) == (2, False, False)
    assert (look.sm_clock_mhz, look.sm_clock_max_mhz, look.temperature_c) == (1980, 1980, 60)
    assert (look.power_w, look.power_limit_w) == (600.0, 700.0)
    assert (look.memory_bytes, look.memory_total_bytes) == (400, 1000)
    assert [xid.code for xid in look.xids] == [63]


def test_the_kit_sees_what_is_held_and_who_computes(gpu: Gpu) -> None:
    seen = memory.Gpu()
    assert (seen.count_used(), seen.count_all(), seen.is_computed_on()) == (400, 1000, True)
    gpu.show(WELL | {"pid": 0})
    assert not seen.is_computed_on()


def test_a_gpu_at_its_power_limit_is_well(gpu: Gpu) -> None:
    assert gpu.live(PEAK, 60) == []
    assert gpu.live(WELL, 10) + gpu.live(PEAK, 60) == []
    assert gpu.live(PEAK | {"xids": 3, "xid": 13, "ecc_corrected": 9000}, 60) == []


@pytest.mark.parametrize(
    ("sick", "word"),
    [
        ({"xids": 1, "xid": 79}, "XID 79"),
        ({"xids": 1, "xid": 48, "ecc_uncorrected": 1}, "XID 48"),
        ({"ecc_uncorrected": 2}, "2 uncorrectable memory errors more"),
        ({"double_bit_pages": 1}, "1 memory page more retired"),
        ({"remapped": 8, "remap_failed": 1}, "rows cannot be remapped"),
        ({"lost": 1}, "device lost"),
    ],
    ids=["bus", "double bit", "ecc", "retired", "rows", "lost"],
)
def test_an_error_is_a_verdict_at_once_and_once(gpu: Gpu, sick: dict[str, int], word: str) -> None:
    assert gpu.live(PEAK, 5) == []
    ((healthy, reason),) = gpu.live(PEAK | sick, 10)
    assert not healthy
    assert word in reason


@pytest.mark.parametrize(
    ("held", "word"),
    [
        (HOT, "hardware thermal slowdown"),
        (BRAKE, "power brake"),
        (CAPPED, "capped far below its power limit"),
    ],
)
def test_a_clock_held_down_is_a_verdict_when_it_lasts(
    gpu: Gpu, held: dict[str, int], word: str
) -> None:
    assert gpu.live(PEAK, 5) + gpu.live(held, 3) + gpu.live(PEAK, 5) == []  # It passed.
    ((healthy, reason),) = gpu.live(held, 20)
    assert not healthy
    assert word in reason
    assert [healthy for healthy, _ in gpu.live(PEAK, 30)] == [True]
    assert gpu.live(held | {"pid": 1}, 30) == []  # None of the job's ranks is on it.
