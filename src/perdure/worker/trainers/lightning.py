"""Lightning's Trainer, resumable.

Where its loops are met, and why there:

- A step ends where the epoch loop begins with the batch after it: validation, schedulers and
  loggers are through with the step by then.
- Everything is restored as the fit loop starts: DDP has wrapped the model by then, and nothing
  has run. Lightning's own restart, which repeats or leaves out parts of an epoch by what it finds
  half done, is not used. Counters are put back to where the step ended, so there is no such part.
- Evaluation, prediction and saving are declared as busy phases, and a step's tokens (or samples)
  as its work.
- An epoch's order may be drawn from the global random state. So three states are put back: that
  in which the epoch's iterator was made, that of its first batch, that of the batch to come.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import lightning
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer import call
from torch.utils.data import DataLoader, IterableDataset

from perdure.model.errors import ConfigError
from perdure.worker.loop import StepLoop
from perdure.worker.rng import capture_rng, restore_rng
from perdure.worker.run import Run, init
from perdure.worker.steering.learning_rate import declare_rate, refuse_zero
from perdure.worker.trainers.driven import Driven, check_names

_OF_TRAINER = (
    "fit_loop", "_signal_connector", "_logger_connector", "strategy", "validate_loop", "test_loop",
    "predict_loop", "save_checkpoint",
)  # fmt: skip
_OF_FIT_LOOP = ("run", "setup_data", "on_run_end", "epoch_loop", "epoch_progress", "_data_fetcher")
_OF_EPOCH_LOOP = ("advance", "on_run_start", "batch_progress", "val_loop", "global_step")
_FLAGS = ("_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint")


def attach(trainer: Any) -> Any:
    """Make `trainer.fit()` resumable under perdure, and return the trainer.

    Call it once, before `fit()` and after any tuning. Without perdure it does nothing.

    Raises:
        ConfigError: the trainer cannot be resumed exactly; the message says why.
    """
    run = init()
    if run.loop is not None:
        if not isinstance(trainer, lightning.Trainer):
            raise ConfigError(f"attach: a {type(trainer).__name__} is no lightning.Trainer")
        check_names("lightning", trainer, _OF_TRAINER)
        check_names("lightning", trainer.fit_loop, _OF_FIT_LOOP)
        check_names("lightning", trainer.fit_loop.epoch_loop, _OF_EPOCH_LOOP)
        if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
            name = type(trainer.strategy).__name__
            raise ConfigError(f"perdure cannot resume Lightning's {name}", hint="use DDP")
        if trainer.world_size != run.world_size:
            raise ConfigError(
                f"the Trainer has {trainer.world_size} processes, the job {run.world_size}",
                hint="Trainer(devices=int(os.environ['LOCAL_WORLD_SIZE']), num_nodes=...)",
            )
        _Attached(trainer, run, run.loop).install()
    return trainer


class _Stopped(Exception):
    """All ranks have agreed to stop before this batch."""


class _Batches(lightning.Callback):  # type: ignore[misc]
    """Shows each batch to `note`, which Lightning hands to callbacks only."""

    def __init__(self, note: Callable[[object], None]) -> None:
        self._note = note

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        """Show the batch that is about to be trained on."""
        self._note(batch)


class _Attached(Driven):
    """perdure's part in one Trainer."""

    def __init__(self, trainer: Any, run: Run, loop: StepLoop) -> None:
        super().__init__(trainer, run, loop)
        self._fit, self._epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._finished = False
        self._entered = 0
        """Lightning's count of steps when this one was begun."""
        self._iterator_rng: dict[str, Any] = {}
        """Random state in which this epoch's iterator was made."""
        self._first_rng: dict[str, Any] | None = None
        """Random state before this epoch's first batch; None while that is to come."""
        self._loops: dict[str, Any] | None = None
        """Counters of an epoch that is to be gone on with."""

    def install(self) -> None:
        """Come between the loops and their methods."""
        fit, epoch = self._fit, self._epoch
        self.come_before(fit, "run", "setup_data", "on_run_end")
        self.come_before(epoch, "on_run_start", "advance")
        trainer = self._trainer
        for loop in (epoch.val_loop, trainer.validate_loop, trainer.test_loop):
            self.declare_busy(loop, "run", "evaluate")
        self.declare_busy(trainer.predict_loop, "run", "predict")
        self.declare_busy(trainer, "save_checkpoint", "save")
        trainer.callbacks.insert(0, _Batches(self.note_batch))  # Those that save come last.

    # --- from the first batch to the last -----------------------------------------------------

    def run(self) -> None:
        """Restore, then fit.

        Raises:
            ConfigError: it was called before; a run's steps are those of one call.
        """
        self._take_back_sigterm()
        self.read_newest("fit()", hint="attach after tuning")
        self._register()
        self.restore()
        try:
            self._theirs["run"]()
        except _Stopped:
            self._fit.on_run_end()
        except BaseException:
            self._loop.abandon()
            raise
        self._finish()

    def _take_back_sigterm(self) -> None:
        """Undo Lightning's handler, which waits for the other ranks inside the handler."""
        before = self._trainer._signal_connector._original_handlers.get(signal.SIGTERM)
        if before is not None:
            with contextlib.suppress(ValueError):  # Not in the main thread: Lightning has none.
                signal.signal(signal.SIGTERM, before)

    def _register(self) -> None:
        trainer = self._trainer
        optimizers = trainer.optimizers
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._run.register(model=trainer.strategy.model, precision=trainer.precision_plugin)
        self._run.register(**{f"optimizer_{i}": one for i, one in enumerate(optimizers)})
        self._run.register(**{f"scheduler_{i}": one for i, one in enumerate(schedulers)})
        declare_rate(self._run.config, optimizers, lambda: (optimizers, schedulers), refuse_zero)
        self._run.register(trainer=self)

    def setup_data(self) -> None:
        """Note what the first epoch's iterator is made with."""
        if self._loops is None and self._fit._data_fetcher is None:
            self._iterator_rng = capture_rng()
        self._theirs["setup_data"]()

    def on_run_start(self, fetcher: Any) -> None:
        """Begin an epoch; on resume, go to where it was left.

        Raises:
            ConfigError: the script's own steps read the data, so that nobody can leave any out.
        """
        if isinstance(fetcher, _DataLoaderIterDataFetcher):
            raise ConfigError("perdure cannot resume a training_step(dataloader_iter)")
        loops, self._loops = self._loops, None
        if loops is not None:
            self._theirs["on_run_start"](fetcher)
            self._load_loops(loops)
            self._position(fetcher, self._epoch.batch_progress.current.ready)
            return
        if self._trainer.current_epoch > 0:
            self._iterator_rng = capture_rng()
        self._first_rng = None
        self._theirs["on_run_start"](fetcher)

    def advance(self, fetcher: Any) -> None:
        """End the step before, if this batch is not part of it; then train on a batch."""
        count = self._epoch.global_step
        if not self._inside or count != self._entered:
            if not self.enter_next():
                raise _Stopped
            self._entered = count
        if self._resume_rng is not None:
            restore_rng(self._resume_rng)
            self._resume_rng = None
        if self._first_rng is None:
            self._first_rng = capture_rng()
        self._theirs["advance"](fetcher)
        if self._trainer._logger_connector.should_update_logs:
            self._run.log(**self._trainer.logged_metrics)

    def on_run_end(self) -> None:
        """End the last step before callbacks exchange the weights."""
        self._finish()
        self._theirs["on_run_end"]()

    def _finish(self) -> None:
        if not self._finished:
            self._finished = True
            self.finish()

    # --- positioning --------------------------------------------------------------------------

    def _position(self, fetcher: Any, batches: int) -> None:
        """Make the epoch's iterator again, behind `batches` that were used."""
        restore_rng(self._iterator_rng)
        loaders = fetcher.combined_loader.flattened
        if batches and len(loaders) == 1 and _has_indices(loaders[0]):
            (loader,) = loaders
            sampler = loader.batch_sampler
            drawn_late = not loader.num_workers  # Else it was drawn as the iterator was made.
            skipping = _Skipping(
                sampler,
                batches,
                before=self._first_rng if drawn_late else None,
                after=self._resume_rng if drawn_late else None,
            )
            object.__setattr__(loader, "batch_sampler", skipping)  # DataLoader's own refuses.
            try:
                iter(fetcher)
            finally:
                object.__setattr__(loader, "batch_sampler", sampler)
            fetcher.fetched = batches
            return
        iter(fetcher)
        if batches and self._first_rng is not None:
            restore_rng(self._first_rng)
        for _ in range(batches):
            next(fetcher)

    def _load_loops(self, loops: dict[str, Any]) -> None:
        """Put the counters back, with no thought of a restart in Lightning's sense."""
        self._fit.load_state_dict(loops)
        epoch = self._epoch
        optimization = (epoch.automatic_optimization, epoch.manual_optimization)
        for loop in (self._fit, epoch, epoch.val_loop, *optimization):
            for flag in _FLAGS:
                setattr(loop, flag, False)

    # --- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what Lightning's checkpoint has beside weights, optimizers and schedulers."""
        trainer = self._trainer
        loops = self._fit.state_dict()
        loops["state_dict"].pop("combined_loader", None)
        weights = trainer.strategy.lightning_module_state_dict()
        kept: dict[str, Any] = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": lightning.__version__,
            "state_dict": weights,
            "callbacks": call._call_callbacks_state_dict(trainer),
        }
        call._call_callbacks_on_save_checkpoint(trainer, kept)
        call._call_lightning_module_hook(trainer, "on_save_checkpoint", kept)
        places = [name for name, value in kept.items() if value is weights]
        for name in places:  # Where the hooks have put them: perdure keeps the weights itself.
            del kept[name]
        hook = call._call_lightning_datamodule_hook
        return {
            "kept": kept,
            "weights": places,
            "data": hook(trainer, "state_dict") if trainer.datamodule is not None else {},
            "loops": loops,
            "iterator_rng": self._iterator_rng,
            "first_rng": self._first_rng,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take it over. Counters within an epoch are taken again once the epoch has begun."""
        trainer = self._trainer
        kept = dict(saved["kept"])
        for name in saved["weights"]:
            kept[name] = trainer.strategy.lightning_module_state_dict()
        call._call_lightning_module_hook(trainer, "on_load_checkpoint", kept)
        if trainer.datamodule is not None and saved["data"]:
            call._call_lightning_datamodule_hook(trainer, "load_state_dict", saved["data"])
        call._call_callbacks_on_load_checkpoint(trainer, kept)
        call._call_callbacks_load_state_dict(trainer, kept)
        self._load_loops(saved["loops"])
        self._iterator_rng, self._first_rng = saved["iterator_rng"], saved["first_rng"]
        progress = self._fit.epoch_progress
        if progress.current.ready > progress.current.completed:
            self._loops = saved["loops"]


class _Skipping:
    """A batch sampler that leaves out the batches that were used, without reading them.

    It draws its order when the first batch is asked for, so it goes between the random states of
    that moment and of now, where they are given.
    """

    def __init__(self, sampler: Any, batches: int, *, before: Any, after: Any) -> None:
        self._sampler, self._batches = sampler, batches
        self._before, self._after = before, after

    def __iter__(self) -> Iterator[Any]:
        if self._before is not None:
            restore_rng(self._before)
        indices = iter(self._sampler)
        for _ in range(self._batches):
            next(indices)
        if self._after is not None:
            restore_rng(self._after)
        yield from indices

    def __len__(self) -> int:
        return len(self._sampler)


def _has_indices(loader: Any) -> bool:
    """Return whether a loader's batches can be left out without reading them."""
    return (
        isinstance(loader, DataLoader)
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
        and not hasattr(loader, "load_state_dict")
        and not loader.persistent_workers
    )
