"""`perdure.init()`: the five lines by which a training script becomes resumable.

    run = perdure.init()
    run.register(model=model, optimizer=optimizer, scheduler=schedule)
    for step, batch in run.batches(dataset, batch_size=8, steps=1000):
        loss = train_step(batch, lr=run.config.lr)
        run.log(loss=loss)

Under `perdure run` this joins the job. Alone, or under torchrun, every call is a no-op that
keeps the same script running: `steps` counts, `batches` yields the same data in the same order.
"""

import atexit
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, SupportsFloat

from perdure.model.errors import ConfigError
from perdure.model.events import RankJoined
from perdure.worker.attach import Attachment, attach_rank
from perdure.worker.busy import Busy, declare_busy
from perdure.worker.loop import StepLoop
from perdure.worker.metrics import MetricsBuffer
from perdure.worker.settings import OWN, declare_own_keys, read_checkpoint_url, read_spec
from perdure.worker.steering.cells import open_cells
from perdure.worker.steering.config import Config, Value
from perdure.worker.work import declare_work


class Run:
    """One training run, as its script sees it. Made by `init`."""

    def __init__(self, config: Config, attachment: Attachment | None) -> None:
        """Join `attachment`'s job; with None, stand alone."""
        self.config = config
        """Settings that may change while it runs; `run.config.declare(lr=...)` names them."""
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._step = self._num_streams = 0
        self.loop: StepLoop | None = None
        """What is behind `steps`, for adapters of trainers that call back; None where alone."""
        self._registered: dict[str, Any] = {}
        self._saver: Any = None
        self._metrics: MetricsBuffer | None = None
        if attachment is not None:
            self._join(attachment)

    @property
    def joined(self) -> bool:
        """Whether perdure supervises this process."""
        return self.loop is not None

    @property
    def step(self) -> int:
        """Committed steps so far: inside the loop, the number of the step under way."""
        return self._step if self.loop is None else self.loop.committed

    def register(self, **objects: Any) -> None:
        """Name what a checkpoint holds: models, optimizers, schedulers, scalers, anything with
        `state_dict` and `load_state_dict`. Call it before the first step.

        Raises:
            ConfigError: an object cannot be saved, or its name is taken.
        """  # noqa: D205
        for name, value in objects.items():
            if self._registered.get(name, value) is not value:
                raise ConfigError(f"register: the name {name!r} is taken by another object")
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise ConfigError(
                    f"register: {name} is a {type(value).__name__} without state_dict",
                    hint="give it state_dict() and load_state_dict(state)",
                )
            if name not in self._registered and self._saver is not None:
                self._saver.register(name, value)
            self._registered[name] = value

    def steps(self, total: int) -> Iterator[int]:
        """Yield the number of each step up to `total`, counted over the whole run.

        The first one is where the newest verified checkpoint left off. A step is committed when
        the next one is asked for. A stop agreed by all ranks ends the loop early.
        """
        loop = self.loop
        if loop is None:
            while self._step < total:
                yield self._step
                self._step += 1
            return
        loop.aim(total)
        loop.begin(total)
        try:
            while loop.committed < total and not loop.stopping:
                loop.enter_step()
                yield loop.committed
                loop.commit_step()
        except BaseException:  # The script has left early.
            loop.abandon()
            raise
        loop.leave()

    def batches(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        steps: int,
        shuffle: bool = True,
        seed: int = 0,
        accumulate: int = 1,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **loader: Any,
    ) -> Iterator[tuple[int, Any]]:
        """Yield (step, batch) up to `steps`: this rank's share of each step's samples.

        Which samples a step uses is a function of `seed` and of how many were used before, which
        each checkpoint keeps. `batch_size` is per rank and micro-batch; with `accumulate` above 1,
        `batch` is a list of that many. Without `batch_size` both follow `run.config.declare_batch`,
        and `batch` is a list. Further arguments go to the DataLoader. The step includes loading.

        Raises:
            ConfigError: the loader cannot be positioned exactly; the message says why.
        """
        from perdure.worker.checkpoint.script import list_generators
        from perdure.worker.data import Plan, count_samples, open_batches

        batch = (batch_size or 0) * accumulate * self.world_size
        plan = Plan(count_samples(dataset), seed=seed, shuffle=shuffle, batch=batch)
        self._register_plan(plan, list_generators("dataset", dataset))
        if self.loop is not None:
            self.loop.aim(steps)
            self.loop.begin(steps)

        def read_sizes() -> tuple[int, int]:
            if batch_size is not None:
                return batch_size, accumulate
            return self.config.micro_batch, self.config.accumulate

        def open_stream(sizes: tuple[int, int]) -> Any:
            return open_batches(
                dataset,
                batch_size=sizes[0],
                start=self.step,
                stop=steps,
                rank=self.rank,
                world_size=self.world_size,
                shuffle=shuffle,
                seed=seed,
                accumulate=sizes[1],
                num_workers=num_workers,
                collate_fn=collate_fn,
                plan=plan,
                **loader,
            )

        sizes = read_sizes()
        if plan.samples < 0:
            plan.samples = self.step * sizes[0] * sizes[1] * self.world_size
        stream = open_stream(sizes)
        try:
            for step in self.steps(steps):
                if read_sizes() != sizes:
                    sizes = read_sizes()
                    stream.close()
                    stream = open_stream(sizes)
                loaded = next(stream)
                yield step, [loaded] if batch_size is None and sizes[1] == 1 else loaded
                plan.samples += sizes[0] * sizes[1] * self.world_size
        finally:
            stream.close()

    def _register_plan(self, plan: Any, drawn: Iterable[str]) -> None:
        if names := ", ".join(drawn):
            plan.doubt = f"no checkpoint has the generator {names}"
        self._num_streams += 1
        if self._saver is not None:
            self._saver.register(f"{OWN}batches.{self._num_streams}", plan)

    def log(self, **metrics: SupportsFloat) -> None:
        """Note values of the step under way. Rank 0's are shown; the others' are ignored.

        A value that is not finite is one like any other. What is no number is left out, said on
        standard error and counted in `perdure diagnose`; nothing that is logged ends a script.
        """
        if self._metrics is not None and self.rank == 0:
            self._metrics.add(self.step, metrics)

    def busy(self, name: str, *, at_most_s: float) -> Busy:
        """Declare that this rank is about to do something long, such as an evaluation.

            with run.busy("evaluate", at_most_s=600):
                evaluate(model)

        Within it, and for `at_most_s` seconds at most, neither this rank's silence nor that of
        ranks that wait for it is taken for a hang. Phases may nest; the latest end counts.

        Raises:
            ConfigError: `name` is no text, or `at_most_s` no time between 0 and a week.
        """
        return declare_busy(name, at_most_s=at_most_s)

    def work(self, amount: SupportsFloat) -> None:
        """Declare how much this rank does in the step under way: tokens, samples, any unit.

            for step, batch in run.batches(dataset, batch_size=8, steps=1000):
                run.work(batch["attention_mask"].sum())    # On the host: a GPU would be waited for.

        Several amounts of one step, such as micro-batches, add up. Where all ranks that are
        compared declare it, the time that each takes is compared for the same amount of work, so
        that long sequences are no slowness. What is no amount is said on standard error and
        ignored; nothing that is declared ends a script.
        """
        declare_work(amount)

    def before_replay(self) -> None:
        """Call it before each replay of a CUDA graph that has captured the optimizer's step.

            run.before_replay()
            graph.replay()

        A replay passes the optimizer by, so that perdure does not see it come: it waits here until
        a checkpoint that is being copied may be overwritten. Without this call each checkpoint of
        such a script is copied at once, while training stands still.
        """
        if self._saver is not None:
            self._saver.enter_replay()

    def checkpoint_now(self) -> None:
        """Save at the end of this step. Every rank must call it in the same step."""
        if self.loop is not None:
            self.loop.save_requested = True

    def _join(self, attachment: Attachment) -> None:
        from perdure.worker.checkpoint import Checkpointer

        attachment.enter("init")
        ring = attachment.ring
        self._metrics = MetricsBuffer(ring.generation, attachment.emit)
        checkpoint = read_spec().checkpoint
        self._saver = Checkpointer(
            url=read_checkpoint_url(checkpoint),
            config=checkpoint,
            rank=self.rank,
            world_size=self.world_size,
            generation=ring.generation,
            emit=attachment.emit,
            now=attachment.now,
            open_cells=open_cells,
        )
        atexit.register(self._saver.leave)
        self.loop = StepLoop(attachment, self._saver, self._metrics, self.config)
        self.loop.every_steps = checkpoint.every_steps
        declare_own_keys(self.config, checkpoint, self.loop)
        self.loop.save_at_end = bool(checkpoint.every_steps or checkpoint.every_s)
        attachment.faults.step = 0  # There will be steps: a fault may wait for one.
        attachment.emit(RankJoined(generation=ring.generation, rank=self.rank))


_run: tuple[int, Run] | None = None


def init(config: Mapping[str, Value] | None = None) -> Run:
    """Join the job that this process is a rank of; alone, return a run that only counts.

    May be called before or after `init_process_group`, and again: the run is the same.
    `config` declares settings, as `run.config.declare` does.
    """
    global _run
    if _run is None or _run[0] != os.getpid():
        _run = (os.getpid(), Run(Config(), attach_rank()))
    run = _run[1]
    run.config.declare_all(config or {})
    return run
