"""The replicated state: parameters, optimizer, schedule. The only place that alters them."""

from typing import Any

import torch
from torch import Tensor, nn

from perdure.model.errors import ConfigError


class Replica:
    """A model with its optimizer and schedule, the same bytes on every rank."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        clip_norm: float = 0.0,
    ) -> None:
        """Update `model` by `optimizer`; gradients are clipped to `clip_norm` if that is not 0.

        `scaler` is a GradScaler. It looks at reduced gradients, which are the same everywhere: a
        step that it skips is skipped, and so committed, by all.
        """
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.scaler, self._clip_norm = scaler, clip_norm
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if scaler is not None:  # Who follows or rolls forward may not have scaled a loss yet.
            scaler.scale(self.parameters[0].new_zeros(1))
        self._guard = BufferGuard(model)

    def update(self, *, clipped: bool = False) -> None:
        """Apply the gradients that the parameters have now.

        `clipped` says that they are, and are unscaled: another member has applied them before.
        """
        if self.scaler is not None:
            self._unscale(done=clipped)
        if self._clip_norm and not clipped:
            nn.utils.clip_grad_norm_(self.parameters, self._clip_norm)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def scale(self, loss: Tensor) -> Tensor:
        """Return what backward is to begin with."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _unscale(self, *, done: bool) -> None:
        """Unscale, and find out whether the step is to be skipped."""
        kept = self.scaler.state_dict()
        if done:
            self.scaler.load_state_dict(kept | {"scale": 1.0})
        self.scaler.unscale_(self.optimizer)
        if done:
            self.scaler.load_state_dict(kept)

    def state(self) -> dict[str, Any]:
        """Return all of it; tensors are not copied."""
        state: dict[str, Any] = {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
        }
        if self.scheduler is not None:
            state["scheduler"] = self.scheduler.state_dict()
        if self.scaler is not None:
            state["scaler"] = self.scaler.state_dict()
        return state

    @property
    def nbytes(self) -> int:
        """Return about what its state has, with the two moments of Adam."""
        return 3 * sum(p.nbytes for p in self.model.parameters())

    def load(self, state: dict[str, Any]) -> None:
        """Become `state`."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        self._guard = BufferGuard(self.model)

    def tensors(self) -> list[Tensor]:
        """Return parameters and buffers, by which replicas are compared."""
        return [t.detach() for t in self.model.state_dict().values() if isinstance(t, Tensor)]

    def refuse_buffers(self) -> None:
        """Refuse a model whose forward pass alters its buffers; see `BufferGuard`."""
        self._guard.check()


class BufferGuard:
    """Sees whether a model's forward pass alters its buffers, as BatchNorm's does."""

    def __init__(self, model: nn.Module) -> None:
        """Watch from now on."""
        self._model = model
        self._versions = [b._version for b in model.buffers()]

    def check(self) -> None:
        """Refuse the model, if it does.

        Raises:
            ConfigError: such a state would depend on which rank computed which micro-batch.
        """
        for (name, buffer), version in zip(
            self._model.named_buffers(), self._versions, strict=True
        ):
            if buffer._version != version:
                raise ConfigError(
                    f"elastic: the forward pass alters the buffer {name}, which ranks would then "
                    "not have in common",
                    hint="use GroupNorm or LayerNorm, or track_running_stats=False",
                )


def make_model(blocks: Any) -> nn.Module:
    """Return `blocks` as one model: a module, or a list of them that is called in order."""
    return blocks if isinstance(blocks, nn.Module) else nn.Sequential(*blocks)
