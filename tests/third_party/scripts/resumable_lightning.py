"""Lightning with perdure's line: dropout, shuffled data, several epochs; leaves a trail."""

import argparse
import json
import os
import time
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy

import perdure.lightning


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(8, generator=torch.Generator().manual_seed(index))


class Small(lightning.LightningModule):
    """Writes down loss and samples of each step that this rank makes."""

    def __init__(self, trail: Path, pace_s: float, hold_at: int) -> None:
        super().__init__()
        self.trail, self.pace_s, self.hold_at = trail, pace_s, hold_at
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1)
        )

    def training_step(self, batch, _):
        index, rows = batch
        time.sleep(self.pace_s)
        while self.global_step == self.hold_at and not (self.trail / "go").exists():
            time.sleep(0.05)
        loss = torch.nn.functional.mse_loss(self.net(rows), rows.sum(1, keepdim=True))
        row = {"rank": self.global_rank, "step": self.global_step, "loss": loss.item().hex()}
        with open(self.trail / f"rank-{self.global_rank}.jsonl", "a") as file:
            print(json.dumps({**row, "indices": index.tolist()}), file=file)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        if self.global_rank == 0:
            print("evaluates from", time.monotonic(), flush=True)
            time.sleep(self.evaluate_s)
            while not (self.trail / "go").exists():
                time.sleep(0.05)
            print("evaluated until", time.monotonic(), flush=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trail", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pace-s", type=float, default=0.0)
    parser.add_argument("--hold-at", type=int, default=-1, help="a step that waits for `go`")
    parser.add_argument("--evaluate-s", type=float, default=0.0, help="rank 0, every 8 steps")
    args = parser.parse_args()
    lightning.seed_everything(1, verbose=False)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=DDPStrategy(process_group_backend="gloo") if ranks > 1 else "auto",
        max_steps=args.steps,
        logger=False,
        log_every_n_steps=5,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        val_check_interval=8 if args.evaluate_s else None,
        num_sanity_val_steps=0,
    )
    perdure.lightning.attach(trainer)
    model = Small(args.trail, args.pace_s, args.hold_at)
    model.evaluate_s = args.evaluate_s
    loaders = [torch.utils.data.DataLoader(Rows(), batch_size=4, shuffle=True)]
    if args.evaluate_s:
        loaders.append(torch.utils.data.DataLoader(Rows(), batch_size=48))
    trainer.fit(model, *loaders)
    if trainer.is_global_zero:
        print(f"finished at step {trainer.global_step}", flush=True)


if __name__ == "__main__":
    main()
