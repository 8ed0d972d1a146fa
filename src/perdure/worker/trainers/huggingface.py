"""Hugging Face's Trainer, resumable.

Where its loop is met, and why there:

- A step ends where the Trainer asks for the next step's batches: logging, evaluation and its own
  checkpoint of the step are over, so none is missing after a resume and none is made twice.
- To go on at step N the Trainer is given a folder with nothing but its own `trainer_state.json`
  of N. It then skips the batches that were used, and builds model, optimizer and scheduler, into
  which perdure restores once DDP has wrapped them.
- The random state is put back after those batches were skipped and the next were read.

Sums that a later log line is made of (`_tr_loss` and its like) are kept as well. Evaluation,
prediction and saving are declared as busy phases, and a step's tokens (or samples) as its work.
"""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from perdure.model.errors import ConfigError
from perdure.worker.loop import StepLoop
from perdure.worker.rng import capture_rng, restore_rng
from perdure.worker.run import Run, init
from perdure.worker.steering.learning_rate import declare_rate, refuse_zero
from perdure.worker.trainers.driven import Driven, check_names

_STATE = "trainer_state.json"
_METHODS = ("get_batch_samples", "_load_from_checkpoint", "_finalize_training")
_LONG = {
    "evaluate": "evaluate", "predict": "predict", "_save_checkpoint": "save", "save_model": "save",
}  # fmt: skip
"""Methods that may be silent for long, and what they are declared as."""
_SUMS = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "current_flos")


def attach(trainer: Any) -> Any:
    """Make `trainer.train()` resumable under perdure, and return the trainer.

    Call it once, before `train()`. Without perdure it does nothing.

    Raises:
        ConfigError: the trainer cannot be resumed exactly; the message says why.
    """
    run = init()
    if run.loop is not None:
        if not isinstance(trainer, Trainer):
            raise ConfigError(f"attach: a {type(trainer).__name__} is no transformers.Trainer")
        check_names("transformers", trainer, (*_METHODS, *_LONG))
        if trainer.is_deepspeed_enabled:
            raise ConfigError(
                "a Trainer with DeepSpeed cannot be resumed by perdure", hint="use DDP"
            )
        if trainer.args.auto_find_batch_size:
            raise ConfigError(
                "auto_find_batch_size starts training again with other steps",
                hint="set per_device_train_batch_size",
            )
        _Attached(trainer, run, run.loop).install()
    return trainer


class _Attached(Driven, TrainerCallback):  # type: ignore[misc]
    """perdure's part in one Trainer."""

    def __init__(self, trainer: Any, run: Run, loop: StepLoop) -> None:
        super().__init__(trainer, run, loop)
        self._folder: str | None = None
        """What `train` was given to go on from, when that is perdure's."""
        self._epoch_rng: dict[str, Any] | None = None
        """Random state at the beginning of this epoch: its order may have been drawn from it."""
        self._first = False
        """Whether this epoch's first batches are still to be asked for."""
        self._resume_first = False

    def install(self) -> None:
        """Come between the trainer and its methods."""
        trainer = self._trainer
        trainer.add_callback(self)
        self.come_before(trainer, "train", *_METHODS)
        for method, name in _LONG.items():
            self.declare_busy(trainer, method, name)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        """Train from perdure's newest checkpoint on, or as asked where there is none yet.

        Raises:
            ConfigError: it was called before; a run's steps are those of one call.
        """
        saved = self.read_newest("train()")
        with tempfile.TemporaryDirectory(prefix="perdure-trainer-") as folder:
            if saved is not None:
                Path(folder, _STATE).write_text(saved["state"])
                resume_from_checkpoint = self._folder = folder
                # Counters of early stopping and the like; the Trainer leaves them out unless asked.
                self._trainer.args.restore_callback_states_from_checkpoint = True
            try:
                return self._theirs["train"](resume_from_checkpoint, *args, **options)
            except BaseException:
                self._loop.abandon()
                raise

    def _load_from_checkpoint(self, folder: Any, *args: Any, **options: Any) -> None:
        """Load nothing from perdure's folder; the weights come later."""
        if folder != self._folder:
            self._theirs["_load_from_checkpoint"](folder, *args, **options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore, now that everything there is to restore into is there."""
        trainer = self._trainer
        check_names("transformers", trainer, (*_SUMS, "_tr_loss"))
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        found = [optimizer], [trainer.lr_scheduler]
        declare_rate(self._run.config, [optimizer], lambda: found, refuse_zero)
        self._run.register(
            model=trainer.model_wrapped,
            optimizer=optimizer,
            scheduler=trainer.lr_scheduler,
            trainer=self,
        )
        if trainer.accelerator.scaler is not None:
            self._run.register(scaler=trainer.accelerator.scaler)
        self._loop.aim(state.max_steps)
        self.restore()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note what the order of this epoch will be drawn from; on resume, put it back."""
        if self._resume_rng is not None:
            restore_rng(self._epoch_rng or self._resume_rng)
        self._epoch_rng = capture_rng()
        self._first = True

    def get_batch_samples(self, *args: Any, **options: Any) -> Any:
        """End the step before; hand out the batches of the next one, or none at the end."""
        trainer = self._trainer
        over = trainer.state.global_step >= trainer.state.max_steps
        if over or not self.enter_next():
            trainer.control.should_training_stop = True
            return [], None
        self._first = False
        rng, self._resume_rng = self._resume_rng, None
        if rng is not None and self._resume_first:
            restore_rng(rng)
        batches = self._theirs["get_batch_samples"](*args, **options)
        if rng is not None and not self._resume_first:
            restore_rng(rng)
        for batch in batches[0]:
            self.note_batch(batch)
        return batches

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave out what a Trainer does at an epoch's end where all ranks have agreed to stop."""
        self._epoch_rng = None
        if self._stopping:
            control.should_log = control.should_evaluate = control.should_save = False

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        """End the last step, before the Trainer loads its best model again."""
        self.finish()
        return self._theirs["_finalize_training"](*args, **options)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Show what the Trainer logs of a step."""
        if self._inside:
            self._run.log(**{n: v for n, v in (logs or {}).items() if isinstance(v, int | float)})

    def state_dict(self) -> dict[str, Any]:
        """Return the Trainer's own state, as it would write it, and what it would not."""
        trainer = self._trainer
        callbacks = [*trainer.callback_handler.callbacks, trainer.control]
        stateful = [each for each in callbacks if isinstance(each, ExportableState)]
        state = dataclasses.replace(trainer.state, stateful_callbacks=stateful)
        return {
            "state": json.dumps(dataclasses.asdict(state)),
            "loss": trainer._tr_loss,
            "sums": {name: getattr(trainer, name) for name in _SUMS},
            "epoch_rng": self._epoch_rng,
            "first": self._first or self._epoch_rng is None,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take over what `train` has not given to the Trainer yet."""
        trainer = self._trainer
        trainer._tr_loss = saved["loss"].to(trainer._tr_loss.device)
        for name, value in saved["sums"].items():
            setattr(trainer, name, value)
        self._epoch_rng, self._resume_first = saved["epoch_rng"], saved["first"]
