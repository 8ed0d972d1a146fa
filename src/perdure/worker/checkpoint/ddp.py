"""DDP's bucket order, recorded and played back.

DistributedDataParallel reduces gradients in buckets. It fills them in the reverse order of the
parameters at first, and before its second forward rebuilds them in the order in which gradients
became ready. A resumed process would begin with the first layout again, and with three ranks or
more a sum in another layout rounds differently. So the rebuilt order lies in the checkpoint, and
on resume one synthetic backward makes gradients ready in that order, so that the reducer rebuilds
what it had. It needs no batch, calls none of the script's code and leaves no gradient.

Not played back: `static_graph`, whose first backward counts how often each hook fires (a count of
a synthetic backward could be wrong, and then gradients would be, silently), and sparse gradients.
Those resume with what DDP does by itself, and the claim of exactness is dropped. With
`find_unused_parameters` DDP never rebuilds, and nothing need be done.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def find_ddp(module: nn.Module) -> dict[str, DistributedDataParallel]:
    """Return every DDP module in `module` (itself included) by its path."""
    found = module.named_modules()
    return {name: part for name, part in found if isinstance(part, DistributedDataParallel)}


def read_bucket_order(module: DistributedDataParallel) -> list[str]:
    """Return the parameters' names in the order of the rebuilt buckets; empty before that.

    It rebuilds them now if the next forward would: a checkpoint after the first step must know
    what the second one will use. All ranks call it at the same step, as they would that forward.
    Torch gives the order only with a gradient's worth of zeros, so ask once and keep the answer.
    """
    if module.reducer._rebuild_buckets():
        module._has_rebuilt_buckets = True
    if not module._has_rebuilt_buckets:
        return []
    names = {id(parameter): name for name, parameter in module.module.named_parameters()}
    buckets: Iterable[Any] = module.reducer._get_zeros_like_grad_buckets()
    return [names[id(p)] for bucket in buckets for p in bucket.parameters()]


def replay_bucket_order(module: DistributedDataParallel, order: list[str]) -> str:
    """Let the reducer rebuild its buckets for gradients ready in `order`; return why it cannot.

    Every rank must call it, because the backward reduces. The caller restores parameters,
    buffers and random state afterwards.
    """
    if not order:
        return ""
    if module._has_rebuilt_buckets:
        same = read_bucket_order(module) == order
        return "" if same else "DDP had already rebuilt its buckets, otherwise"
    parameters = dict(module.module.named_parameters())
    why = _find_obstacle(module)
    if not why and set(order) != {name for name, p in parameters.items() if p.requires_grad}:
        why = "DDP's parameters have changed"
    if why:
        return why
    module.reducer.prepare_for_forward()
    module.reducer.prepare_for_backward([])
    with torch.enable_grad():
        for name in order:  # One backward each: the engine promises no order within one.
            (parameters[name].reshape(-1)[:1] * 0.0).sum().backward()
    module._has_rebuilt_buckets = module.reducer._rebuild_buckets()
    for parameter in parameters.values():
        parameter.grad = None
    return "" if module._has_rebuilt_buckets else "DDP did not rebuild its buckets"


def _find_obstacle(module: DistributedDataParallel) -> str:
    if module.static_graph:
        return "DDP(static_graph=True) orders its buckets anew"
    if any(getattr(part, "sparse", False) for part in module.module.modules()):
        return "DDP with sparse gradients orders its buckets anew"
    return ""
