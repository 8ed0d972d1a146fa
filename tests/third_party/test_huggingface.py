"""A resumed Hugging Face Trainer does what one does that was never stopped: the real library.

In one process; with real ranks, really killed: test_exact_trainers.py.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
import torch  # noqa: E402
from transformers import (  # noqa: E402
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import perdure.huggingface  # noqa: E402
from perdure.model.errors import ConfigError  # noqa: E402
from perdure.model.steering import Change  # noqa: E402
from perdure.worker.steering.boundary import Agreed  # noqa: E402
from tests.third_party.lone import Killed, declared_phases, join, stamp_stages  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]
SPEEDS = ("runtime", "per_second", "total_flos")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A model of this size is slower with two, and far slower where the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of random tokens, of three lengths."""

    def __len__(self) -> int:
        return 25

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= len(self):
            raise IndexError(index)
        chance = torch.Generator().manual_seed(index)
        row = torch.randint(0, 32, (6 + index % 3,), generator=chance)
        return {"input_ids": row, "labels": row}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    pad = torch.nn.functional.pad
    return {
        "input_ids": torch.stack(
            [pad(r["input_ids"], (0, width - len(r["input_ids"]))) for r in rows]
        ),
        "labels": torch.stack(
            [pad(r["labels"], (0, width - len(r["labels"])), value=-100) for r in rows]
        ),
    }


class Say(TrainerCallback):  # type: ignore[misc]
    """Notes each step's loss, and ends training in the middle of step `kill_at`."""

    def __init__(self, kill_at: int = -1) -> None:
        self.kill_at = kill_at
        self.trainer: Any = None
        self.losses: dict[int, str] = {}
        self.total = 0.0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.kill_at:
            raise Killed

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.losses[state.global_step] = self.trainer._tr_loss.item().hex()


class Fading(TrainerCallback):  # type: ignore[misc]
    """Its plain attributes decide on the gradients, and no state has them."""

    def __init__(self) -> None:
        self.factor, self.seen = 1.0, [1.0]

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.factor *= 0.95
        self.seen.append(self.factor)
        for parameter in given["model"].parameters():
            parameter.grad.mul_(sum(self.seen) / len(self.seen))


def make(
    folder: Path, kill_at: int = -1, callbacks: Any = (), **options: Any
) -> tuple[Trainer, Say]:
    set_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=32,
            n_positions=8,
            n_embd=16,
            n_layer=1,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    settings = {
        "num_train_epochs": 3, "per_device_train_batch_size": 4, "save_strategy": "no",
        "logging_steps": 3, "warmup_steps": 4, "lr_scheduler_type": "cosine",
        "report_to": [], "use_cpu": True, "disable_tqdm": True,
    } | options  # fmt: skip
    say = Say(kill_at)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(folder), **settings),
        train_dataset=Tokens(),
        eval_dataset=torch.utils.data.Subset(Tokens(), range(6)),
        data_collator=collate,
        callbacks=[say, Fading(), *callbacks],
    )
    say.trainer = trainer
    return perdure.huggingface.attach(trainer), say


def outcome(trainer: Trainer) -> dict[str, Any]:
    """Return what must not depend on an interruption."""
    rows = [
        {name: value for name, value in row.items() if not any(s in name for s in SPEEDS)}
        for row in trainer.state.log_history
    ]
    weights = {name: value.tolist() for name, value in trainer.model.state_dict().items()}
    return {"step": trainer.state.global_step, "rows": rows, "weights": weights}


EARLY = {
    "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss",
    "greater_is_better": True,
}  # fmt: skip
"""A metric that never gets better, so that training ends early."""


@pytest.mark.parametrize(
    ("every", "kill_at", "options"),
    [
        pytest.param(5, 11, {}, marks=pytest.mark.long),  # saved in the second epoch of 7 steps
        (3, 7, {"gradient_accumulation_steps": 2}),
        pytest.param(  # drawn from the global state
            5, 11, {"train_sampling_strategy": "group_by_length"}, marks=pytest.mark.long
        ),
        (7, 8, {"train_sampling_strategy": "group_by_length"}),  # saved where an epoch ends
        pytest.param(  # evaluation draws from it as well
            5, 12, {"eval_strategy": "steps", "eval_steps": 5}, marks=pytest.mark.long
        ),
        pytest.param(
            7, 8, {"eval_strategy": "epoch", "logging_strategy": "epoch"}, marks=pytest.mark.long
        ),
        (5, 11, EARLY),
    ],
)
def test_resumed_training_is_bitwise_the_uninterrupted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    every: int,
    kill_at: int,
    options: dict[str, Any],
) -> None:
    def build(kill_at: int = -1) -> tuple[Trainer, Say]:
        callbacks = [EarlyStoppingCallback(5)] if options is EARLY else []
        return make(tmp_path, kill_at, callbacks, **options)

    join(tmp_path / "reference", monkeypatch, 0)
    whole, reference = build()
    whole.train()
    run = join(tmp_path / "killed", monkeypatch, every)
    with pytest.raises(Killed):
        build(kill_at)[0].train()
    run._saver.close()
    join(tmp_path / "killed", monkeypatch, every, generation=1)
    trainer, say = build()
    trainer.train()
    assert sorted(say.losses) == list(range(1, whole.state.global_step + 1))
    assert say.losses == reference.losses
    assert outcome(trainer) == outcome(whole)
    assert (whole.state.global_step < whole.state.max_steps) == (options is EARLY)


def test_a_learning_rate_that_was_set_is_kept_and_a_stop_leaves_nothing_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped at the very end of an epoch, and run again."""
    options = {"eval_strategy": "epoch", "logging_strategy": "steps", "logging_steps": 1}
    change = Agreed("e1", "set", 5, Change(epoch=1, step=5, values={"lr": 1e-3}))

    def build(home: str, generation: int, *plans: Agreed) -> tuple[Trainer, Say]:
        run = join(tmp_path / home, monkeypatch, 10, generation)
        for plan in plans:
            run.loop._gate.plan(plan)
        return make(tmp_path, **options)

    whole, reference = build("reference", 0, change)
    whole.train()
    first, before = build("stopped", 0, change, Agreed("b", "stop", 7))
    first.train()
    assert (first.state.global_step, max(before.losses)) == (7, 7)
    again, after = build("stopped", 1)
    again.train()
    assert {**before.losses, **after.losses} == reference.losses
    assert sorted(after.losses) == list(range(1, 22))
    assert outcome(again) == outcome(whole)
    rates = [row["learning_rate"] for row in whole.state.log_history if "learning_rate" in row]
    assert max(rates[:5]) <= 5e-5 < rates[5], rates


def test_a_finished_training_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = []
    for generation in range(2):
        join(tmp_path / "job", monkeypatch, 5, generation)
        trainer, say = make(tmp_path, max_steps=10)
        trainer.train()
        losses.append(say.losses)
        assert trainer.state.global_step == 10
    assert losses[0] == losses[1]
    assert len(losses[0]) == 10


def test_without_perdure_the_trainer_stays_as_it_is(tmp_path: Path) -> None:
    trainer, say = make(tmp_path, max_steps=2)
    assert "train" not in vars(trainer)
    trainer.train()
    assert len(say.losses) == 2


def test_what_cannot_be_resumed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    join(tmp_path / "job", monkeypatch, 5)
    with pytest.raises(ConfigError, match="auto_find_batch_size"):
        make(tmp_path, auto_find_batch_size=True)
    with pytest.raises(ConfigError, match=r"no transformers\.Trainer"):
        perdure.huggingface.attach(object())
    monkeypatch.delattr(Trainer, "get_batch_samples")
    with pytest.raises(ConfigError, match="has no get_batch_samples"):
        make(tmp_path)


def test_the_tokens_of_a_step_are_its_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With padding, and of both micro-batches."""
    read_work = stamp_stages(join(tmp_path, monkeypatch, 100))
    trainer, _ = make(tmp_path / "out", gradient_accumulation_steps=2, num_train_epochs=1)
    tokens: list[int] = []

    def note(model: torch.nn.Module, words: tuple[Any, ...], named: dict[str, Any]) -> None:
        tokens.append(named["input_ids"].numel())

    trainer.model.register_forward_pre_hook(note, with_kwargs=True)
    trainer.train()
    assert len(tokens) == 7
    pairs = [sum(tokens[i : i + 2]) for i in range(0, 7, 2)]
    assert read_work() == pairs


def test_evaluation_prediction_and_saving_are_declared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row T5: what a Trainer does in silence is no hang; later ones have learned the length."""
    run = join(tmp_path, monkeypatch, 100)
    seen = declared_phases(tmp_path / "0.ring", monkeypatch, run)

    class Look(TrainerCallback):  # type: ignore[misc]
        def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen("predicting")

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen("saved")

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen("training")

    options = {"save_strategy": "steps", "save_steps": 6, "eval_strategy": "steps", "eval_steps": 6}
    trainer, _ = make(tmp_path / "out", callbacks=[Look()], max_steps=12, **options)
    saved = trainer._save
    monkeypatch.setattr(trainer, "_save", lambda *a, **k: (seen("saving"), saved(*a, **k)))
    trainer.train()
    trainer.predict(trainer.eval_dataset)
    assert seen.phases["training"] == {""}
    assert seen.phases["saving"] == {"save 3600", "save 600"}
    assert seen.phases["predicting"] == {"evaluate 3600", "evaluate 600", "predict 3600"}
    assert seen.phase() == ""
