"""What the script registered, sorted by how it is saved.

Models and their optimizers go through torch.distributed.checkpoint, by parameter name, so that a
checkpoint can be read into another sharding. Everything else (schedulers, scalers, the user's own
objects) is small and each rank's own.
"""

from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from perdure.worker.checkpoint.ddp import read_bucket_order, replay_bucket_order


class Registry:
    """The registered objects of one rank."""

    def __init__(self) -> None:
        """Start empty."""
        self.models: dict[str, nn.Module] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.others: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        """Register one object under its name."""
        if isinstance(value, nn.Module):
            self.models[name] = value
        elif isinstance(value, Optimizer):
            self.optimizers[name] = value
        else:
            self.others[name] = value

    def owner(self, optimizer: Optimizer) -> nn.Module | None:
        """Return the registered model whose parameters `optimizer` has; None for a loose one."""
        wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for model in self.models.values():
            if wanted <= {id(p) for p in model.parameters()}:
                return model
        return None

    def tensors(self) -> dict[str, Any]:
        """Return the state that is saved by tensor name; no copies, the live tensors."""
        state: dict[str, Any] = {
            f"model.{name}": get_model_state_dict(model) for name, model in self.models.items()
        }
        for name, optimizer in self.optimizers.items():
            model = self.owner(optimizer)
            if model is not None:
                state[f"optimizer.{name}"] = get_optimizer_state_dict(model, optimizer)
        return state

    def load_tensors(self, state: dict[str, Any]) -> None:
        """Put what was read into `state` (from `tensors`) back into the objects."""
        for name, model in self.models.items():
            set_model_state_dict(model, state[f"model.{name}"])
        for name, optimizer in self.optimizers.items():
            owner = self.owner(optimizer)
            if owner is not None:
                set_optimizer_state_dict(owner, optimizer, state[f"optimizer.{name}"])

    def own(self) -> dict[str, Any]:
        """Return the small state that is this rank's own."""
        loose = {n: o for n, o in self.optimizers.items() if self.owner(o) is None}
        orders = {name: read_bucket_order(model) for name, model in self.models.items()}
        return {
            "objects": {n: v.state_dict() for n, v in {**self.others, **loose}.items()},
            "bucket_order": {name: order for name, order in orders.items() if order},
        }

    def load_own(self, state: dict[str, Any]) -> list[str]:
        """Put this rank's own state back; return the names that the checkpoint lacks."""
        loose = {n: o for n, o in self.optimizers.items() if self.owner(o) is None}
        objects = {**self.others, **loose}
        for name, value in objects.items():
            if name in state["objects"]:
                value.load_state_dict(state["objects"][name])
        return sorted(set(objects) - set(state["objects"]))

    def replay(self, state: dict[str, Any]) -> None:
        """Bring DDP's buckets into the recorded order, before anything else is restored."""
        for name, model in self.models.items():
            replay_bucket_order(model, state.get("bucket_order", {}).get(name, []))

    def is_volatile(self, path: str) -> bool:
        """Return whether the tensor at `path` may change before the optimizer's next step.

        True for every buffer, and for models of which no optimizer is registered.
        """
        kind, _, rest = path.lstrip("/").partition("/")
        if not kind.startswith("model."):
            return False
        model = self.models[kind.removeprefix("model.")]
        if not any(self.owner(optimizer) is model for optimizer in self.optimizers.values()):
            return True
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        return rest not in {name for name, _ in inner.named_parameters()}
