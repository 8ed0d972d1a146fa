"""Hugging Face Trainer on a tiny random model: resumes by itself from its newest checkpoint."""

import argparse
import os
import time

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint


class Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


class Say(TrainerCallback):
    """One line a step, so that a test can see where it is; and a pace."""

    def __init__(self, pace_s: float, hold_at: int) -> None:
        self.pace_s, self.hold_at = pace_s, hold_at

    def on_step_end(self, args, state, control, **_):
        time.sleep(self.pace_s)
        while state.global_step == self.hold_at and not os.path.exists(f"{args.output_dir}/go"):
            time.sleep(0.05)
        if state.is_world_process_zero:
            print(f"step {state.global_step}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pace-s", type=float, default=0.0)
    parser.add_argument("--hold-at", type=int, default=-1, help="a step that waits for `go`")
    args = parser.parse_args()
    set_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    )
    training = TrainingArguments(
        output_dir=args.out,
        max_steps=args.steps,
        per_device_train_batch_size=4,
        save_steps=10,
        save_total_limit=2,
        logging_steps=10,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        ddp_backend="gloo",
    )
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=Tokens(),
        callbacks=[Say(args.pace_s, args.hold_at)],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.out))
    if trainer.is_world_process_zero():
        print(f"finished at step {trainer.state.global_step}", flush=True)


if __name__ == "__main__":
    main()
