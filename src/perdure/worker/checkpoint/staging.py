"""A copy of the training state, taken beside the next forward and backward.

Parameters and optimizer moments do not change until the optimizer's next step, so they may be
copied while the next forward and backward run; `wait` before that step is the gate. Everything
else (buffers change in forward, and what is small) is copied at once. The copies lie in slabs
that are used again by the next checkpoint: one more copy of the state in host memory.

A copy is good if it equals its source at the gate. A script may write parameters by hand meanwhile
(the copy has what they were for a moment), so the gate compares: all bits of the first copies, and
blocks drawn from a seed of the later ones. Nobody publishes a copy before (`confirm`). Torch's
counts of changes are a cheap first look: writes through `.data` do not count. If a copy is not its
source, it is worth nothing, says so, and from then on all is copied at once.

On a device the gate holds the device and not the CPU, so the next update may be counted before the
copy is done: there the gate itself looks at the counts, and nothing is compared.

A CUDA graph that has captured an optimizer's step changes what it likes, counts nothing and passes
no gate. So all is copied at once where a step was captured, or no gate was passed since the copy
before, unless the script passes the gate itself, before each replay.
"""

import itertools
import random
import threading
import time
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from perdure.model.errors import PlatformError
from perdure.worker.checkpoint.device_copies import DeviceCopies, Events
from perdure.worker.checkpoint.plain import copy_plain, visit
from perdure.worker.checkpoint.slabs import Slabs

GIVE_WAY_S = 0.2
"""The longest that the writer waits for an optimizer's step."""
_COMPARED_WHOLE = 2
"""Copies of which every bit is compared."""
_BLOCKS, _BLOCK = 64, 4096
"""Tensors of a later copy of which a block is compared, and a block's elements at most."""
_SMALL = 4096
"""Elements up to which a tensor is copied at once: a thread would cost more."""


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Staging:
    """The reused memory of one rank, and the copy under way."""

    def __init__(self, device: DeviceCopies | None = None) -> None:
        """Hold nothing yet; `device` is how a device's tensors are copied."""
        self._device = device or DeviceCopies()
        self._pinned = Slabs(self._device.make_block)
        self._own = Slabs(self._device.make_block)
        self._pageable = Slabs(_make_block)
        self._done = threading.Event()
        self._done.set()
        self._calm = threading.Event()
        self._calm.set()
        self._late: list[tuple[str, Tensor, Tensor, int]] = []
        self._events: Events = {}
        self._looking = threading.Lock()
        self._changed: str | None = None
        """Which tensor was changed before the gate, empty for none; None: nobody has looked."""
        self._uncompared: list[tuple[str, Tensor, Tensor]] = []
        """What the gate compares: key, source, and copy."""
        self._compared = threading.Event()
        self._compared.set()
        self._num_compared = 0
        self._torn = False
        """A copy was changed under way: whoever does so passes no gate."""
        self._passed = False
        """A gate was passed since the last copy began."""
        self.captured = False
        """An optimizer's step was captured, whose replays pass no gate but the script's own."""

    def begin(self, tensors: dict[str, Tensor], late: Collection[str]) -> dict[str, Tensor]:
        """Return copies of `tensors`; those of the keys in `late` may be filled by `run`."""
        self._late, self._events, self._changed = [], {}, None
        late = late if self._passed and not self.captured and not self._torn else ()
        self._passed = False
        sources = {key: _take_local(value) for key, value in tensors.items()}
        on_device = {key for key, one in sources.items() if self._device.is_on_device(one)}
        staged = {
            **self._pinned.fit({key: one for key, one in sources.items() if key in on_device}),
            **self._pageable.fit({k: one for k, one in sources.items() if k not in on_device}),
        }
        waiting = {key for key in late if sources[key].numel() > _SMALL}
        if waiting & on_device:
            waiting &= on_device  # The gate holds a device or the CPU.
        now = [key for key in sources if key not in waiting]
        self._device.copy_now([(staged[key], sources[key]) for key in now if key in on_device])
        for key in now:
            if key not in on_device:
                staged[key].copy_(sources[key])
        self._late = [
            (key, one, staged[key], one._version) for key, one in sources.items() if key in waiting
        ]
        self._uncompared = [] if waiting & on_device else [one[:3] for one in self._late]
        if self._uncompared:
            self._compared.clear()
        if waiting & on_device:
            after = self._device.mark(sources[key] for key in waiting)
            pairs = [(target, source) for _, source, target, _ in self._late]
            self._events = self._device.copy_late(pairs, after)
        self._done.clear()
        return {key: _wrap_alike(staged[key], value) for key, value in tensors.items()}

    def copy_own(self, plain: Any) -> Any:
        """Return a deep copy on the CPU of plain state: containers, tensors, arrays, numbers.

        A device is waited for once, however many tensors it has. What it copied lies in memory
        that the next such copy uses again.
        """
        found: list[Tensor] = []
        visit(plain, lambda one: found.append(_take_local(one)), lambda _: None)
        sources = {
            str(number): source
            for number, source in enumerate(found)
            if self._device.is_on_device(source) and is_ordinary(source)
        }
        places = self._own.fit(sources)
        self._device.copy_now([(places[key], source) for key, source in sources.items()])
        numbers = itertools.count()

        def take(source: Tensor) -> Tensor:
            place = places.get(str(next(numbers)))
            return _take_local(source).to("cpu", copy=True) if place is None else place

        return visit(plain, take, copy_plain)

    def run(self) -> None:
        """Copy what could wait; called in the background thread. Opens the gate in any case.

        Raises:
            PlatformError: a tensor was changed before the optimizer's step.
        """
        try:
            if self._events:
                self._device.wait(self._events)
            else:
                for _, source, target, _ in self._late:
                    target.copy_(source)
            self._refuse(self._find_changed())
        finally:
            self._late = []
            self._done.set()

    def confirm(self) -> None:
        """Wait until the gate has compared the copy with the state; called before it is published.

        Raises:
            PlatformError: they differ.
        """
        self._compared.wait()
        self._refuse(self._find_changed())

    def _refuse(self, key: str) -> None:
        if key:
            self._torn = True
            raise PlatformError(
                f"{key} was changed between a step's end and the next optimizer step; "
                "from now on everything is copied at once"
            )

    def wait(self) -> float:
        """Wait until the state may change, and compare the copy; return the seconds it took."""
        if self._done.is_set() and not self._uncompared:
            return 0.0
        began = time.monotonic()
        if self._events:
            self._find_changed()
            self._device.hold(self._events)
        else:
            self._done.wait()
        self._compare()
        return time.monotonic() - began

    def _compare(self) -> None:
        pairs, self._uncompared = self._uncompared, []
        if not pairs:
            return
        self._num_compared += 1
        chance = random.Random(self._num_compared)
        blocks = self._num_compared > _COMPARED_WHOLE
        for key, source, target in (
            chance.sample(pairs, _BLOCKS) if len(pairs) > _BLOCKS and blocks else pairs
        ):
            if not _is_same(source, target, chance if blocks else None):
                with self._looking:
                    self._changed = self._changed or key
                break
        self._compared.set()

    def _find_changed(self) -> str:
        """Return which tensor was changed while it could be copied; empty for none.

        Who comes first looks, the gate or the end of the copy, and the other hears the same.
        """
        with self._looking:
            if self._changed is None:
                changed = (key for key, source, _, seen in self._late if source._version != seen)
                self._changed = next(changed, "")
            return self._changed

    def enter_update(self) -> float:
        """Gate before an optimizer's step, which also quiets the writer; return seconds waited.

        A step that a graph captures changes nothing, and may not wait.
        """
        if is_capturing():
            self.captured = True
            return 0.0
        self._calm.clear()
        self._passed = True
        return self.wait()

    def enter_replay(self) -> float:
        """Gate before a replay of a captured step; return seconds waited."""
        self.captured = False
        self._passed = True
        return self.wait()

    def leave_update(self) -> None:
        """The optimizer's step is over."""
        self._calm.set()

    def give_way(self) -> None:
        """Hold the writing thread while an optimizer steps, briefly.

        A step over all parameters is bound by memory's bandwidth, and so is writing them: beside
        one another both took half as long again. Bounded, for a step that raised.
        """
        if not self._calm.wait(GIVE_WAY_S):
            self._calm.set()


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured by this thread."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False  # A torch without CUDA cannot be asked.
    return torch.cuda.is_current_stream_capturing()


def _is_same(one: Tensor, other: Tensor, chance: random.Random | None) -> bool:
    """Return whether two tensors have the same bits: all of them, or those of a drawn block."""
    while chance is not None and one.numel() > _BLOCK:
        if one.dim() == 1:
            begin = chance.randrange(one.numel() - _BLOCK + 1)
            one, other = one[begin : begin + _BLOCK], other[begin : begin + _BLOCK]
        else:
            place = chance.randrange(one.shape[0])
            one, other = one[place], other[place]
    return torch.equal(read_bits(one), read_bits(other))


def read_bits(value: Tensor) -> Tensor:
    """Return a view as integers: NaN equals itself, and 0.0 is not -0.0."""
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    return value.view(_INTEGERS[value.itemsize])


def _make_block(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _take_local(value: Tensor) -> Tensor:
    """Return what of `value` is here, detached."""
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


def _wrap_alike(local: Tensor, value: Tensor) -> Tensor:
    """Return `local`, sharded as `value` is."""
    if not isinstance(value, DTensor):
        return local
    # Not DTensor.from_local: that would move the copy back to the mesh's device.
    return DTensor(local, value._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def is_ordinary(tensor: Tensor) -> bool:
    """Return whether a tensor is its bytes: strided, of no class or kind of its own."""
    return type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_quantized
