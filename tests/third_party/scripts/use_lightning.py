"""Lightning with DDP on the CPU: resumes from its `last.ckpt`."""

import argparse
import os
import time

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy


class Tiny(lightning.LightningModule):
    def __init__(self, pace_s: float, hold_at: int, go: str) -> None:
        super().__init__()
        self.pace_s, self.hold_at, self.go = pace_s, hold_at, go
        self.net = torch.nn.Linear(8, 1)

    def training_step(self, batch, _):
        x, y = batch
        time.sleep(self.pace_s)
        if self.global_rank == 0:
            print(f"step {self.global_step}", flush=True)
        while self.global_step == self.hold_at and not os.path.exists(self.go):
            time.sleep(0.05)
        return torch.nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pace-s", type=float, default=0.0)
    parser.add_argument("--hold-at", type=int, default=-1, help="a step that waits for `go`")
    args = parser.parse_args()
    lightning.seed_everything(1, verbose=False)
    inputs = torch.randn(1024, 8)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=DDPStrategy(
            process_group_backend="gloo", cluster_environment=TorchElasticEnvironment()
        ),
        max_steps=args.steps,
        callbacks=[ModelCheckpoint(dirpath=args.out, every_n_train_steps=10, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = os.path.join(args.out, "last.ckpt")
    trainer.fit(
        Tiny(args.pace_s, args.hold_at, f"{args.out}/go"),
        torch.utils.data.DataLoader(data, batch_size=8, shuffle=True),
        ckpt_path=last if os.path.exists(last) else None,
    )
    if trainer.is_global_zero:
        print(f"finished at step {trainer.global_step}", flush=True)


if __name__ == "__main__":
    main()
