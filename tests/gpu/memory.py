"""What NVML says of the first GPU, for processes that are to make no context on it."""

from perdure.adapters.devices import Nvml


class Gpu:
    """The first GPU, seen from outside."""

    def __init__(self) -> None:
        nvml = Nvml.open()
        assert nvml is not None, "NVML shows no GPU"
        self._nvml = nvml

    def count_used(self) -> int:
        """Return the bytes in use, whoever's they are."""
        return self._nvml.sample(lambda one: (), {})[0].memory_bytes

    def count_all(self) -> int:
        """Return how many bytes it has."""
        return self._nvml.sample(lambda one: (), {})[0].memory_total_bytes

    def is_computed_on(self) -> bool:
        """Return whether a process computes there, also one of another container."""
        return bool(self._nvml.list_used())
