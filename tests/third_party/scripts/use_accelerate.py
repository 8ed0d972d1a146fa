"""Accelerate: its own launcher's variables, its state saved and loaded by the script."""

import argparse
import os
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pace-s", type=float, default=0.0)
    parser.add_argument("--hold-at", type=int, default=-1, help="a step that waits for `go`")
    args = parser.parse_args()
    set_seed(1)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(1024, 8)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    marker = os.path.join(args.out, "newest")
    if os.path.exists(marker):
        with open(marker, encoding="utf-8") as file:
            step = int(file.read())
        accelerator.load_state(os.path.join(args.out, f"state-{step}"))
    while step < args.steps:
        for x, y in loader:
            if step == args.steps:
                break
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            time.sleep(args.pace_s)
            while step == args.hold_at and not os.path.exists(f"{args.out}/go"):
                time.sleep(0.05)
            accelerator.print(f"step {step}", flush=True)
            if step % 10 == 0:
                save(accelerator, args.out, step)
    accelerator.print(f"finished at step {step} on {accelerator.num_processes} processes")
    accelerator.end_training()


def save(accelerator: Accelerator, out: str, step: int) -> None:
    accelerator.save_state(os.path.join(out, f"state-{step}"))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        with open(os.path.join(out, "newest.tmp"), "w", encoding="utf-8") as file:
            file.write(str(step))
        os.replace(file.name, os.path.join(out, "newest"))


if __name__ == "__main__":
    main()
