"""Hugging Face Trainer with perdure's line: dropout, shuffled data, several epochs; a trail."""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import perdure.huggingface


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row, "index": torch.tensor(index)}


class Trailing(Trainer):
    """Writes down loss and samples of each step that this rank makes."""

    def __init__(self, trail: Path, pace_s: float, hold_at: int, **options) -> None:
        super().__init__(**options)
        self.hold_at, self.go = hold_at, trail / "go"
        self.trail = trail / f"rank-{self.args.process_index}.jsonl"
        self.pace_s = pace_s

    def compute_loss(self, model, inputs, *args, **options):
        samples = inputs.pop("index").tolist()
        if not model.training:
            return super().compute_loss(model, inputs, *args, **options)
        loss = super().compute_loss(model, inputs, *args, **options)
        time.sleep(self.pace_s)
        while self.state.global_step == self.hold_at and not self.go.exists():
            time.sleep(0.05)
        row = {"rank": self.args.process_index, "step": self.state.global_step}
        with open(self.trail, "a") as file:
            print(json.dumps({**row, "loss": loss.item().hex(), "indices": samples}), file=file)
        return loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trail", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pace-s", type=float, default=0.0)
    parser.add_argument("--hold-at", type=int, default=-1, help="a step that waits for `go`")
    parser.add_argument("--evaluate-s", type=float, default=0.0, help="rank 0, every 8 steps")
    args = parser.parse_args()
    set_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    )
    training = TrainingArguments(
        output_dir=str(args.trail),
        max_steps=args.steps,
        per_device_train_batch_size=4,
        save_strategy="no",
        logging_steps=7,
        remove_unused_columns=False,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        ddp_backend="gloo" if "RANK" in os.environ else None,
        eval_strategy="steps" if args.evaluate_s else "no",
        eval_steps=8,
    )

    def measure(_) -> dict[str, float]:
        if training.process_index == 0:
            print("evaluates from", time.monotonic(), flush=True)
            time.sleep(args.evaluate_s)
            while not (args.trail / "go").exists():
                time.sleep(0.05)
            print("evaluated until", time.monotonic(), flush=True)
        return {"measured": 1.0}

    trainer = Trailing(
        args.trail, args.pace_s, args.hold_at, model=model, args=training, train_dataset=Tokens(),
        eval_dataset=torch.utils.data.Subset(Tokens(), range(8)), compute_metrics=measure,
    )  # fmt: skip
    perdure.huggingface.attach(trainer)
    trainer.train()
    if trainer.is_world_process_zero():
        print(f"finished at step {trainer.state.global_step}", flush=True)


if __name__ == "__main__":
    main()
