"""A resumed Lightning Trainer does what one does that was never stopped: the real library.

In one process; with real ranks, really killed: test_exact_trainers.py.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

lightning = pytest.importorskip("lightning")
import torch  # noqa: E402
from lightning.pytorch.callbacks import EarlyStopping  # noqa: E402
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging  # noqa: E402

import perdure.lightning  # noqa: E402
from perdure.model.errors import ConfigError  # noqa: E402
from perdure.model.steering import Change  # noqa: E402
from perdure.worker.steering.boundary import Agreed  # noqa: E402
from tests.third_party.lone import Killed, declared_phases, join, stamp_stages  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]
BATCHES = 7


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Rows(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """Rows with noise from the global random state, as many augmentations draw it."""

    def __init__(self, noise: float) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        row = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return index, row + self.noise * (torch.randn(8) + random.random())


class Tiny(lightning.LightningModule):  # type: ignore[misc]
    """Dropout, BatchNorm, a schedule by step and one by epoch; notes what each batch did."""

    def __init__(self, kill_at: int = -1, noise: float = 0.1, workers: int = 0) -> None:
        super().__init__()
        self.kill_at, self.noise, self.workers = kill_at, noise, workers
        self.persistent = False
        self.trail: list[tuple[int, str, tuple[int, ...]]] = []
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3),
            torch.nn.Linear(16, 1),
        )  # fmt: skip

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        index, rows = batch
        if self.global_step == self.kill_at:
            raise Killed
        loss = (self.net(rows) - rows.sum(1, keepdim=True)).square().mean()
        self.trail.append((self.global_step, loss.item().hex(), tuple(index.tolist())))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("never_better", 1.0)

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches  # It makes the loader's iterator early.
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 2}]

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(
            Rows(self.noise), batch_size=4, shuffle=True,
            num_workers=self.workers, persistent_workers=self.persistent,
        )  # fmt: skip

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Rows(1.0), batch_size=13, shuffle=True)


class Fading(lightning.Callback):  # type: ignore[misc]
    """Its plain attributes decide on the gradients, and it has no state_dict."""

    def __init__(self) -> None:
        self.factor, self.seen = 1.0, [1.0]

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.factor *= 0.95
        self.seen.append(self.factor)
        for parameter in module.parameters():
            parameter.grad.mul_(sum(self.seen) / len(self.seen))


def make(folder: Path, model: Tiny, callbacks: Any = (), **options: Any) -> Any:
    settings = {"max_epochs": 3, "limit_val_batches": 0, "accelerator": "cpu"} | options
    trainer = lightning.Trainer(
        default_root_dir=folder, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, callbacks=[*callbacks],
        log_every_n_steps=2, **settings,
    )  # fmt: skip
    return perdure.lightning.attach(trainer)


def outcome(trainer: Any, model: Tiny) -> dict[str, Any]:
    """Return what must not depend on an interruption."""
    return {
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "weights": {name: value.tolist() for name, value in model.state_dict().items()},
    }


VALIDATED = {"limit_val_batches": 1.0, "num_sanity_val_steps": 1}


@pytest.mark.parametrize(
    ("every", "kill_at", "options", "callback"),
    [
        pytest.param(5, 11, {}, "", marks=pytest.mark.long),  # saved in the second epoch
        (5, 6, {}, ""),  # saved in the first
        pytest.param(BATCHES, 8, {}, "", marks=pytest.mark.long),  # saved where an epoch ends
        (3, 7, {"accumulate_grad_batches": 2}, ""),
        (5, 11, {"max_epochs": None, "max_steps": 17}, ""),
        pytest.param(5, 11, {"val_check_interval": 2, **VALIDATED}, "", marks=pytest.mark.long),
        (BATCHES, 8, VALIDATED, ""),
        (5, 11, {"val_check_interval": 2, **VALIDATED}, "early"),
        (5, 11, {}, "average"),
    ],
)
def test_resumed_training_is_bitwise_the_uninterrupted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    every: int,
    kill_at: int,
    options: dict[str, Any],
    callback: str,
) -> None:
    def build(kill_at: int = -1) -> tuple[Any, Tiny]:
        lightning.seed_everything(1, verbose=False)
        model = Tiny(kill_at)
        callbacks = {
            "": [Fading()],
            "early": [EarlyStopping("never_better", patience=6)],
            "average": [EMAWeightAveraging(decay=0.5)],
        }[callback]
        return make(tmp_path, model, callbacks, **options), model

    join(tmp_path / "reference", monkeypatch, 0)
    whole, reference = build()
    whole.fit(reference)
    run = join(tmp_path / "killed", monkeypatch, every)
    trainer, model = build(kill_at)
    with pytest.raises(Killed):
        trainer.fit(model)
    run._saver.close()
    join(tmp_path / "killed", monkeypatch, every, generation=1)
    trainer, model = build()
    trainer.fit(model)
    assert model.trail == reference.trail
    assert outcome(trainer, model) == outcome(whole, reference)
    assert callback != "early" or whole.global_step < 3 * BATCHES


def test_the_order_is_kept_with_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are left out by their indices, or read again where workers stay for all epochs."""
    for kind in ("indices", "read"):

        def build(kill_at: int = -1, kind: str = kind) -> tuple[Any, Tiny]:
            lightning.seed_everything(1, verbose=False)
            model = Tiny(kill_at, noise=0.0, workers=2)
            model.persistent = kind == "read"
            return make(tmp_path, model, max_epochs=2), model

        join(tmp_path / f"{kind} reference", monkeypatch, 0)
        whole, reference = build()
        whole.fit(reference)
        run = join(tmp_path / kind, monkeypatch, 10)
        trainer, model = build(11)
        with pytest.raises(Killed):
            trainer.fit(model)
        run._saver.close()
        join(tmp_path / kind, monkeypatch, 10, generation=1)
        trainer, model = build()
        trainer.fit(model)
        assert model.trail == reference.trail, kind


def test_a_learning_rate_that_was_set_is_kept_and_a_stop_leaves_nothing_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in mid-epoch and at the very end of one, and run again."""
    change = Agreed("e1", "set", 4, Change(epoch=1, step=4, values={"lr": 0.1}))

    def fit(home: str, generation: int, *plans: Agreed) -> tuple[Any, Tiny]:
        run = join(tmp_path / home, monkeypatch, 10, generation)
        for plan in plans:
            run.loop._gate.plan(plan)
        lightning.seed_everything(1, verbose=False)
        model = Tiny()
        trainer = make(tmp_path, model)
        trainer.fit(model)
        return trainer, model

    whole, reference = fit("reference", 0, change)
    parts = [
        fit("stopped", 0, change, Agreed("b", "stop", BATCHES)),
        fit("stopped", 1, Agreed("b", "stop", 11)),
        fit("stopped", 2),
    ]
    assert [len(model.trail) for _, model in parts] == [7, 11, 21]
    assert parts[-1][1].trail == reference.trail
    assert outcome(*parts[-1]) == outcome(whole, reference)
    again, idle = fit("stopped", 3)
    assert (again.global_step, idle.trail) == (21, reference.trail)


def test_without_perdure_the_trainer_stays_as_it_is(tmp_path: Path) -> None:
    model = Tiny()
    trainer = make(tmp_path, model, max_steps=2)
    assert "run" not in vars(trainer.fit_loop)
    trainer.fit(model)
    assert len(model.trail) == 2


def test_what_cannot_be_resumed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = join(tmp_path / "job", monkeypatch, 5)
    with pytest.raises(ConfigError, match=r"no lightning\.Trainer"):
        perdure.lightning.attach(object())
    trainer = make(tmp_path, Tiny(), max_steps=2)
    trainer.fit(Tiny())
    with pytest.raises(ConfigError, match="once in a run"):
        trainer.fit(Tiny())
    run.world_size = 2
    with pytest.raises(ConfigError, match="has 1 processes, the job 2"):
        make(tmp_path, Tiny())


def test_the_samples_of_a_step_are_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both micro-batches; the last batch of an epoch is a small one."""
    read_work = stamp_stages(join(tmp_path, monkeypatch, 100))
    model = Tiny()
    make(tmp_path, model, accumulate_grad_batches=2, max_epochs=1).fit(model)
    samples: dict[int, int] = {}
    for step, _, indices in model.trail:
        samples[step] = samples.get(step, 0) + len(indices)
    assert read_work() == list(samples.values())
    assert len(set(samples.values())) > 1


def test_evaluation_prediction_and_saving_are_declared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row T5: what a Trainer does in silence is no hang; later ones have learned the length."""
    run = join(tmp_path, monkeypatch, 100)
    seen = declared_phases(tmp_path / "0.ring", monkeypatch, run)

    class Looking(Tiny):
        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            seen("training")
            return super().training_step(batch, number)

        def validation_step(self, batch: Any, number: int) -> None:
            seen("evaluating")
            super().validation_step(batch, number)

        def test_step(self, batch: Any, number: int) -> None:
            seen("testing")

        def predict_step(self, batch: Any, _: int) -> torch.Tensor:
            seen("predicting")
            return torch.zeros(1)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            seen("saving")

    model = Looking()
    trainer = make(tmp_path, model, **VALIDATED, max_epochs=2)
    trainer.fit(model)
    loader = model.val_dataloader()
    trainer.test(model, loader, verbose=False)
    trainer.predict(model, loader)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer.save_checkpoint(tmp_path / "b.ckpt")
    assert seen.phases["training"] == {""}
    assert seen.phases["evaluating"] == {"evaluate 3600", "evaluate 600"}
    assert seen.phases["testing"] == {"evaluate 600"}
    assert seen.phases["predicting"] == {"predict 3600"}
    assert {"save 3600", "save 600"} <= seen.phases["saving"]
    assert seen.phase() == ""
