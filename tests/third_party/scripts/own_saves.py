"""Saves at every step as a library does it, and resumes as its documents say.

Arguments: the library. `trail` says what each life did; rank 0 writes it.
"""

import glob
import os
import re
import sys

import torch
import torch.distributed as dist

FORM, OUT, WIDTH = sys.argv[1], "out", 1 << 20


def tell(word: str, step: int) -> None:
    if int(os.environ["RANK"]) == 0:
        fd = os.open("trail", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(fd, f"{word} {step}\n".encode())
        os.close(fd)


def find_newest() -> str:
    paths = [p for p in glob.glob(f"{OUT}/*") if re.search(r"\d", p)]
    return max(paths, key=lambda p: int(re.findall(r"\d+", p)[-1]), default="")


def is_enough() -> bool:
    """Return whether all ranks see the file that ends the test."""
    flag = torch.tensor([float(os.path.exists("enough"))])
    if dist.is_initialized():
        dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def train_transformers() -> None:
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )
    from transformers.trainer_utils import get_last_checkpoint

    class Tokens(torch.utils.data.Dataset):
        def __len__(self):
            return 100_000

        def __getitem__(self, index):
            row = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(index))
            return {"input_ids": row, "labels": row}

    class Trail(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            tell("began", state.global_step)

        def on_step_end(self, args, state, control, **_):
            tell("saving", state.global_step)

        def on_save(self, args, state, control, **_):
            tell("saved", state.global_step)
            control.should_training_stop = is_enough()

    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=256, n_layer=2, n_head=2)
    args = TrainingArguments(
        output_dir=OUT, max_steps=100_000, save_steps=1, save_total_limit=4, report_to=[],
        use_cpu=True, per_device_train_batch_size=2, disable_tqdm=True,
    )  # fmt: skip
    newest = get_last_checkpoint(OUT) if os.path.isdir(OUT) else None
    trainer = Trainer(GPT2LMHeadModel(config), args, train_dataset=Tokens(), callbacks=[Trail()])
    trainer.train(resume_from_checkpoint=newest)


def train_lightning() -> None:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Small(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(512, 512)

        def training_step(self, batch, _):
            tell("saving", self.global_step + 1)
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

        def on_train_start(self):
            tell("began", self.global_step)

        def on_train_batch_end(self, *_):
            self.trainer.should_stop = is_enough()

    saver = ModelCheckpoint(OUT, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", max_steps=-1,
        max_epochs=-1, callbacks=[saver], logger=False, enable_progress_bar=False,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(torch.randn(512, 512), batch_size=4)
    trainer.fit(Small(), loader, ckpt_path=find_newest() or None)


def loop(load, save) -> None:
    """Save at every step by `save`, from where `load` says."""
    path = find_newest()
    step = load(path) if path else 0
    tell("began", step)
    while not is_enough():
        step += 1
        tell("saving", step)
        save(step)
        if dist.is_initialized():
            dist.barrier()
        tell("saved", step)


def train_accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(512, 512)
    model, _optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    def load(path: str) -> int:
        accelerator.load_state(path)
        return int(next(model.parameters()).flatten()[0].item())

    def save(step: int) -> None:
        with torch.no_grad():
            for weight in model.parameters():
                weight.fill_(float(step))
        accelerator.save_state(f"{OUT}/checkpoint-{step}")

    loop(load, save)


def train_safetensors() -> None:
    from safetensors.torch import load_file, save_file

    dist.init_process_group("gloo")
    os.makedirs(OUT, exist_ok=True)

    def save(step: int) -> None:
        if dist.get_rank() == 0:
            save_file({"w": torch.full((WIDTH,), float(step))}, f"{OUT}/{step:06}.safetensors")

    loop(lambda path: int(load_file(path)["w"][-1]), save)


def train_dcp() -> None:
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("gloo")

    def load(path: str) -> int:
        state = {f"w{rank}": torch.zeros(WIDTH) for rank in range(dist.get_world_size())}
        dcp.load(state, checkpoint_id=path)
        return int(state["w0"][-1])

    def save(step: int) -> None:
        dcp.save({f"w{dist.get_rank()}": torch.full((WIDTH,), float(step))},
                 checkpoint_id=f"{OUT}/step-{step}")  # fmt: skip

    loop(load, save)


if __name__ == "__main__":
    globals()[f"train_{FORM}"]()
