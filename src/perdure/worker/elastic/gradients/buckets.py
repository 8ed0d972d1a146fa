"""Gradients, copied into buckets and reduced as copies while backward still runs.

What a rank has accumulated in `p.grad` is never handed to a collective: a peer that dies in the
middle of an all-reduce leaves partial sums in whatever was being reduced, and these lie in the
copies, which are simply made again. The reduced result stays in one of two sets of buffers until
the next step is reduced, which is what the commit rule asks for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

BUCKET_BYTES = 8 << 20
_FIRST_BYTES = 1 << 20
"""The first bucket is small, so that the first all-reduce begins early."""
_EXACT_ENOUGH = (torch.float32, torch.float64)


@dataclass(slots=True)
class Bucket:
    """Neighbouring parameters of one dtype and device, last ones first."""

    params: list[Tensor]
    flats: tuple[Tensor, ...]
    """For even and odd steps, or for all."""
    views: tuple[list[Tensor], ...]
    missing: int = 0
    """Parameters whose gradient the backward pass under way has not finished."""


@dataclass(slots=True)
class _Pass:
    """The last backward pass of a step: buckets leave as they fill up, in order."""

    step: int
    send: Callable[[Tensor], None]
    scale: float
    next: int = 0


@dataclass(slots=True)
class _Group:
    key: Any
    params: list[Tensor] = field(default_factory=list)
    bytes: int = 0


class Buckets:
    """The gradients of `params`."""

    def __init__(
        self, params: Sequence[Tensor], bucket_bytes: int, sets: int = 2, rider: int = 0
    ) -> None:
        """Make buffers for two steps (or one), and watch each parameter's gradient.

        `rider` numbers are summed with the first bucket: a collective of their own would cost
        more than all else that a step does here. Where that bucket has less than 32 bits a number,
        there are none.
        """
        self.params = [p for p in params if p.requires_grad]
        groups = _split(self.params, bucket_bytes)
        if not groups or groups[0].params[0].dtype not in _EXACT_ENOUGH:
            rider = 0
        self.buckets = [
            _make_bucket(group, sets, 0 if number else rider) for number, group in enumerate(groups)
        ]
        self.riders = [flat[-rider:] for flat in self.buckets[0].flats] if rider else []
        """For even and odd steps; gradients are scaled, and these are not."""
        self._of = {p: b for b in self.buckets for p in b.params}
        self._pass: _Pass | None = None
        self._failure: Exception | None = None
        self._hooks: list[Any] = [
            param.register_post_accumulate_grad_hook(self.note)  # type: ignore[no-untyped-call]
            for param in self.params
        ]

    def close(self) -> None:
        """Watch the parameters no longer."""
        for hook in self._hooks:
            hook.remove()

    def flats(self, step: int) -> list[Tensor]:
        """Return the buffers of a step."""
        return [_of_step(bucket.flats, step) for bucket in self.buckets]

    def list_views(self, step: int) -> dict[Tensor, Tensor]:
        """Return each parameter's part of the buffers of a step."""
        return {
            param: view
            for bucket in self.buckets
            for param, view in zip(bucket.params, _of_step(bucket.views, step), strict=True)
        }

    def arm(self, step: int, scale: float, send: Callable[[Tensor], None]) -> None:
        """Hand each bucket, times `scale`, to `send` once the coming backward has filled it."""
        self._pass, self._failure = _Pass(step, send, scale), None
        for bucket in self.buckets:
            bucket.missing = len(bucket.params)

    def flush(self) -> None:
        """Send what is left: buckets with parameters that had no gradient, or all of them.

        Raises whatever a `send` during backward has raised.
        """
        current, self._pass = self._pass, None
        if self._failure is not None:
            raise self._failure
        if current is not None:
            for bucket in self.buckets[current.next :]:
                self._send(current, bucket)

    def disarm(self) -> None:
        """Send nothing more."""
        self._pass, self._failure = None, None

    def copy(self, step: int, scale: float) -> list[Tensor]:
        """Copy all gradients, times `scale`, into the buffers of `step` and return these."""
        for bucket in self.buckets:
            _fill(bucket, step, scale)
        return self.flats(step)

    def expose(self, step: int) -> None:
        """Make the buffers of `step` the parameters' gradients."""
        for bucket in self.buckets:
            for param, view in zip(bucket.params, _of_step(bucket.views, step), strict=True):
                param.grad = view

    def drop(self) -> None:
        """Forget what was accumulated."""
        for param in self.params:
            param.grad = None

    def note(self, param: Tensor) -> None:
        """The gradient of `param` is there: in an armed pass, full buckets leave."""
        current = self._pass
        if current is None:
            return
        self._of[param].missing -= 1
        while current.next < len(self.buckets) and not self.buckets[current.next].missing:
            bucket = self.buckets[current.next]
            current.next += 1
            if self._failure is None:
                try:
                    self._send(current, bucket)
                except Exception as error:  # Not through the autograd engine: `flush` raises it.
                    self._failure = error

    def _send(self, current: _Pass, bucket: Bucket) -> None:
        _fill(bucket, current.step, current.scale)
        current.send(_of_step(bucket.flats, current.step))


def _fill(bucket: Bucket, step: int, scale: float) -> None:
    with torch.no_grad():
        for param, view in zip(bucket.params, _of_step(bucket.views, step), strict=True):
            if param.grad is None:
                view.zero_()
            else:
                torch.mul(param.grad, scale, out=view)


def _split(params: Sequence[Tensor], bucket_bytes: int) -> list[_Group]:
    """Return the parameters, last first, in groups of about `bucket_bytes`."""
    groups: list[_Group] = []
    for param in reversed(params):
        key = (param.dtype, param.device)
        limit = _FIRST_BYTES if len(groups) == 1 else bucket_bytes
        if not groups or groups[-1].key != key or groups[-1].bytes >= limit:
            groups.append(_Group(key))
        groups[-1].params.append(param)
        groups[-1].bytes += param.nbytes
    return groups


def _of_step(sets: tuple[Any, ...], step: int) -> Any:
    return sets[step % len(sets)]


def _make_bucket(group: _Group, sets: int, rider: int) -> Bucket:
    dtype, device = group.key
    sizes = [p.numel() for p in group.params]
    total = sum(sizes) + rider
    flats = tuple(torch.zeros(total, dtype=dtype, device=device) for _ in range(sets))
    views: list[list[Tensor]] = []
    for flat in flats:
        parts = torch.split(flat[: total - rider], sizes)
        views.append([part.view_as(p) for part, p in zip(parts, group.params, strict=True)])
    return Bucket(list(group.params), flats, tuple(views))
