"""DDP's bucket order, recorded and played back.

DistributedDataParallel reduces gradients in buckets. It fills them in the reverse order of the
parameters at first, and after the first backward rebuilds them in the order in which gradients
became ready. A resumed process would begin with the first layout again, and with three ranks or
more a sum in another layout rounds differently. So the rebuilt order lies in the checkpoint, and
on resume one synthetic backward makes gradients ready in that order, through the module itself,
so that the reducer rebuilds what it had. It needs no batch and leaves no gradient.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def read_bucket_order(module: nn.Module) -> list[str]:
    """Return the parameters' names in the order of the rebuilt buckets; empty where not DDP."""
    if not isinstance(module, DistributedDataParallel):
        return []
    names = {id(parameter): name for name, parameter in module.module.named_parameters()}
    buckets: Iterable[Any] = module.reducer._get_zeros_like_grad_buckets()
    return [names[id(p)] for bucket in buckets for p in bucket.parameters()]


def replay_bucket_order(module: nn.Module, order: list[str]) -> None:
    """Let the reducer of `module` rebuild its buckets for gradients ready in `order`.

    Every rank must call it, because the backward reduces. The caller restores parameters,
    buffers and random state afterwards.
    """
    if not isinstance(module, DistributedDataParallel) or not order:
        return
    parameters = dict(module.module.named_parameters())
    if set(order) != {name for name, p in parameters.items() if p.requires_grad}:
        return
    inner = module.module

    def synthetic_forward(*_: Any, **__: Any) -> Tensor:
        # The engine runs what was made last first; so the first to be ready is added last.
        total = torch.zeros((), device=parameters[order[-1]].device)
        for name in reversed(order):
            total = total + parameters[name].reshape(-1)[:1].sum().float().to(total.device) * 0.0
        return total

    # Through the module's own forward: the reducer only counts gradients it was prepared for.
    inner.forward = synthetic_forward
    try:
        with torch.enable_grad():
            module(torch.zeros(())).backward()
    finally:
        del inner.forward
    module.reducer._rebuild_buckets()
    for parameter in parameters.values():
        parameter.grad = None
