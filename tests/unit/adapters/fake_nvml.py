"""NVML by hand: the functions that perdure calls, over plain dictionaries."""

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

Process = namedtuple("Process", "pid usedGpuMemory", defaults=(None,))
Memory = namedtuple("Memory", "used total")


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class FakeNvml:
    NVMLError = NVMLError
    NVML_ERROR_GPU_IS_LOST, NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_TIMEOUT = 15, 3, 10
    NVML_CLOCK_SM, NVML_VOLATILE_ECC = 1, 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
    NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR = 1
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, *gpus: dict[str, Any]) -> None:
        self.gpus = list(gpus)
        self.xids: list[tuple[int, int]] = []
        """(index, code) not yet told."""
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13000

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, gpu: dict[str, Any]) -> bytes:
        if gpu.get("lost"):
            raise NVMLError(self.NVML_ERROR_GPU_IS_LOST)
        return str(gpu["uuid"]).encode()

    def nvmlDeviceGetMigMode(self, gpu: dict[str, Any]) -> list[int]:
        return [int("mig" in gpu), int("mig" in gpu)]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: dict[str, Any]) -> int:
        return len(self._get(gpu, "mig"))

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: dict[str, Any], index: int) -> Any:
        return gpu["mig"][index]

    def nvmlDeviceGetName(self, gpu: dict[str, Any]) -> str:
        return str(self._get(gpu, "name"))

    def nvmlDeviceGetMemoryInfo(self, gpu: dict[str, Any]) -> Memory:
        return Memory(*self._get(gpu, "memory"))

    def nvmlDeviceGetRemappedRows(self, gpu: dict[str, Any]) -> list[int]:
        return list(self._get(gpu, "rows"))

    def nvmlDeviceGetTotalEccErrors(self, gpu: dict[str, Any], which: int, _: int) -> int:
        return int(self._get(gpu, "ecc")[which])

    def nvmlDeviceGetRetiredPages(self, gpu: dict[str, Any], _: int) -> list[int]:
        return list(self._get(gpu, "pages"))

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: dict[str, Any]) -> int:
        return int(self._get(gpu, "throttle"))

    def nvmlDeviceGetClockInfo(self, gpu: dict[str, Any], _: int) -> int:
        return int(self._get(gpu, "clock"))

    def nvmlDeviceGetMaxClockInfo(self, gpu: dict[str, Any], _: int) -> int:
        return int(self._get(gpu, "clock_max"))

    def nvmlDeviceGetPowerUsage(self, gpu: dict[str, Any]) -> int:
        return int(self._get(gpu, "power_mw"))

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: dict[str, Any]) -> int:
        return int(self._get(gpu, "limit_mw"))

    def nvmlDeviceGetTemperature(self, gpu: dict[str, Any], _: int) -> int:
        return int(self._get(gpu, "temperature"))

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: dict[str, Any]) -> list[Process]:
        sizes = gpu.get("sizes", {})
        return [Process(pid, sizes.get(pid)) for pid in gpu.get("pids", sizes)]

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlDeviceRegisterEvents(self, *_: object) -> None:
        pass

    def nvmlEventSetWait_v2(self, *_: object) -> Any:
        if not self.xids:
            raise NVMLError(self.NVML_ERROR_TIMEOUT)
        index, code = self.xids.pop(0)
        return SimpleNamespace(device=self.gpus[index], eventData=code)

    def _get(self, gpu: dict[str, Any], key: str) -> Any:
        if gpu.get("lost"):
            raise NVMLError(self.NVML_ERROR_GPU_IS_LOST)
        if key not in gpu:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return gpu[key]
