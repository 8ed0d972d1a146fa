"""A copy of tensors that stand still for a while, made beside training.

Parameters and optimizer moments change in an update only. So a thread copies them while the next
forward and backward pass run (`Copy.make`). The update waits at a gate until the copy is made
(`Copy.wait`). If that takes longer than `DEADLINE_S`, the copy is thrown away, and training goes
on. Checkpoints, snapshots in memory, and states for ranks that join are copied this way.

A copy is good if it equals its source at the gate. A script may write parameters by hand before the
gate, and the copy has what they were for a moment. So the gate compares all bits of a `Copier`'s
first copies, and random blocks of the later ones. Torch's counts of changes are a cheap first look:
writes through `.data` do not count. After the first difference, `Copier.torn` tells its user to
copy at once: to pass the gate before training goes on.

What a device has is compared by torch's counts alone. If its copies are issued at the beginning,
the gate holds the device and not the CPU. Then the next update may be counted before the copy is
made, so the gate itself looks at the counts.
"""

import random
import time
from collections.abc import Mapping, Sequence
from threading import Event, RLock

import torch
from torch import Tensor

from perdure.model.errors import PlatformError
from perdure.worker.checkpoint.device_copies import DeviceCopies, Events

DEADLINE_S = 60.0
"""Seconds for which an update waits for a copy."""
COMPARED_WHOLE = 2
"""Copies of which every bit is compared."""
_BLOCKS, _BLOCK = 64, 4096
"""Tensors of a later copy of which a block is compared, and a block's elements at most."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Copier:
    """Makes the copies of one state, one after another."""

    def __init__(self, device: DeviceCopies | None = None) -> None:
        """Copy nothing yet; `device` is how a device's tensors are copied."""
        self.device = device or DeviceCopies()
        self.torn = False
        """A source was changed while it was copied: pass the gate at once from now on."""
        self.num_compared = 0
        """Copies that a gate has compared."""


class Copy:
    """One copy: `make` runs in a thread, `wait` is the gate, `confirm` says whether it is good."""

    def __init__(
        self,
        copier: Copier,
        sources: Mapping[str, Tensor],
        targets: Sequence[Tensor] = (),
        *,
        issued: bool = False,
    ) -> None:
        """Begin to copy `sources`, by name, which may not change until `wait` has returned.

        `targets`, one for each source, may be set later. `issued`: devices copy by themselves from
        now on, and the gate holds them and not the CPU.
        """
        self._copier, self._device, self.targets = copier, copier.device, targets
        self._sources = {key: (one, one._version) for key, one in sources.items()}
        self.marks = self._device.mark(filter(self._device.is_on_device, sources.values()))
        """What each device has to come to before it copies."""
        self._events = self._issue() if issued else {}
        self._uncompared: list[tuple[str, Tensor, Tensor]] = []
        """What the gate compares: key, source, and copy."""
        self.made, self._judged, self._looking = Event(), Event(), RLock()
        self.problem: str | None = None
        """Why the copy is thrown away; empty if it is good, None before the first look."""
        if not sources:
            self._judged.set()

    def _issue(self) -> Events:
        pairs = [
            (target, source)
            for (source, _), target in zip(self._sources.values(), self.targets, strict=True)
            if self._device.is_on_device(source)
        ]
        return self._device.copy_late(pairs, self.marks)

    def make(self) -> None:
        """Copy what is not copied yet; called in a thread. Opens the gate in any case.

        Raises:
            PlatformError: a source was changed, or the copy is late.
        """
        try:
            events = self._events or self._issue()
            pairs = zip(self._sources.items(), self.targets, strict=True)
            of_cpu = [
                (key, source, target)
                for (key, (source, _)), target in pairs
                if not self._device.is_on_device(source)
            ]
            for _, source, target in of_cpu:
                target.copy_(source)
            self._device.wait(events)
            self._look()
            self._uncompared = [] if self._judged.is_set() else of_cpu
            if not of_cpu:
                self._judged.set()
        finally:
            self._sources, self.targets = {}, ()
            self.made.set()
        self._refuse()

    def wait(self) -> float:
        """Wait until the sources may change, and compare; return the seconds that it took."""
        if self._judged.is_set():
            return 0.0
        began = time.monotonic()
        if self._events:
            self._look()
            self._device.hold(self._events)
        elif self.made.wait(DEADLINE_S):
            self._compare()
        else:
            self.drop(f"the copy was not made within {DEADLINE_S:.0f} s")
        self._uncompared = []
        self._judged.set()
        return time.monotonic() - began

    def drop(self, why: str) -> None:
        """Throw the copy away: it is not made, or its sources change before the gate."""
        with self._looking:
            self.problem = self.problem or why
        self._judged.set()

    def confirm(self) -> None:
        """Wait until the gate has compared the copy with its sources.

        Raises:
            PlatformError: they differ, or the copy is late.
        """
        self._judged.wait()
        self._refuse()

    def _refuse(self) -> None:
        if self.problem != "":
            raise PlatformError(self.problem or "the copy could not be made")

    def _look(self) -> None:
        """See whether a source was changed. The gate or `make` looks, whichever comes first."""
        with self._looking:
            if self.problem is None:
                found = (key for key, (one, seen) in self._sources.items() if one._version != seen)
                self._judge(next(found, ""))

    def _compare(self) -> None:
        pairs, whole = self._uncompared, self._copier.num_compared < COMPARED_WHOLE
        if not pairs or self.problem:
            return
        self._copier.num_compared += 1
        chance = None if whole else random.Random(self._copier.num_compared)
        drawn = chance.sample(pairs, min(_BLOCKS, len(pairs))) if chance else pairs
        found = (key for key, source, copy in drawn if not _is_same(source, copy, chance))
        self._judge(next(found, ""))

    def _judge(self, changed: str) -> None:
        why = (
            f"{changed} was changed between a step's end and the next optimizer step; "
            "from now on everything is copied at once"
        )
        with self._looking:
            self.problem = self.problem or (why if changed else "")
        self._copier.torn = self._copier.torn or bool(changed)


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


def is_ordinary(tensor: Tensor) -> bool:
    """Return whether a tensor is its bytes: strided, of no class or kind of its own."""
    return type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_quantized
