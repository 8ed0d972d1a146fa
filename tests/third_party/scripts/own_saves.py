"""Saves at every step as a library does it, and resumes as its documents say.

Arguments: the library, and the number of steps from one save to the next (1). Rank 0 writes what
each life did into `trail`, and the loss of each step into `losses`.
"""

import glob
import os
import re
import sys

import torch
import torch.distributed as dist

FORM, OUT, WIDTH = sys.argv[1], "out", 1 << 20
EVERY = int(sys.argv[2]) if len(sys.argv) > 2 else 1


def append(path: str, *words: object) -> None:
    if int(os.environ["RANK"]) == 0:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(fd, (" ".join(map(str, words)) + "\n").encode())
        os.close(fd)


def tell(word: str, step: int) -> None:
    append("trail", word, step)


def note(step: int, loss: torch.Tensor) -> None:
    append("losses", step, loss.item().hex())


def draw(step: int, width: int) -> torch.Tensor:
    """Return this rank's batch of a step, the same in each life."""
    seed = 1000 * step + int(os.environ["RANK"])
    return torch.randn(4, width, generator=torch.Generator().manual_seed(seed))


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
        set_seed,
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
            if state.global_step % EVERY == 0:
                tell("saving", state.global_step)

        def on_save(self, args, state, control, **_):
            tell("saved", state.global_step)
            control.should_training_stop = is_enough()

    class Noting(Trainer):
        def training_step(self, *args, **options):
            loss = super().training_step(*args, **options)
            note(self.state.global_step + 1, loss)
            return loss

    # Without dropout: a save at SIGTERM has the random state of after the next forward pass.
    config = GPT2Config(
        vocab_size=32, n_positions=8, n_embd=256, n_layer=2, n_head=2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    args = TrainingArguments(
        output_dir=OUT, max_steps=100_000, save_steps=EVERY, save_total_limit=4, report_to=[],
        use_cpu=True, per_device_train_batch_size=2, disable_tqdm=True,
        enable_jit_checkpoint=EVERY > 1,
    )  # fmt: skip
    found = bool(os.path.isdir(OUT) and get_last_checkpoint(OUT))
    set_seed(1)
    trainer = Noting(GPT2LMHeadModel(config), args, train_dataset=Tokens(), callbacks=[Trail()])
    trainer.train(resume_from_checkpoint=found)


def train_lightning() -> None:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Small(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(512, 512)

        def training_step(self, batch, _):
            step = self.global_step + 1
            loss = self.net(draw(step, 512)).square().mean()
            note(step, loss)
            if step % EVERY == 0:
                tell("saving", step)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

        def on_train_start(self):
            tell("began", self.global_step)

        def on_train_batch_end(self, *_):
            self.trainer.should_stop = is_enough()

    class Telling(ModelCheckpoint):
        def _save_checkpoint(self, trainer, path):
            super()._save_checkpoint(trainer, path)
            if os.path.basename(path) == "last.ckpt":
                tell("saved", trainer.global_step)

    saver = Telling(
        OUT, filename="{step}", every_n_train_steps=EVERY, save_top_k=-1, save_last=True
    )
    lightning.seed_everything(1)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", max_steps=-1,
        max_epochs=-1, callbacks=[saver], logger=False, enable_progress_bar=False,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(torch.randn(512, 512), batch_size=4)
    trainer.fit(Small(), loader, ckpt_path="last")


def loop(load, save, train=None, find=find_newest) -> None:
    """Make steps by `train` and save by `save`, from where `load` says."""
    path = find()
    step = load(path) if path else 0
    tell("began", step)
    while not is_enough():
        step += 1
        if train:
            note(step, train(step))
        if step % EVERY:
            continue
        tell("saving", step)
        save(step)
        if dist.is_initialized():
            dist.barrier()
        tell("saved", step)


def train_accelerate() -> None:
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    accelerator = Accelerator(cpu=True)
    set_seed(1)
    model = torch.nn.Linear(512, 512)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    def load(path: str) -> int:
        accelerator.load_state(path)
        return int(path.rpartition("-")[2])

    def train(step: int) -> torch.Tensor:
        loss = model(draw(step, 512)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    loop(load, lambda step: accelerator.save_state(f"{OUT}/checkpoint-{step}"), train)


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


def train_deepspeed() -> None:
    import deepspeed

    # Without it, DeepSpeed compiles a faster all-reduce first: minutes on a busy machine.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)

    def load(path: str) -> int:
        loaded, state = engine.load_checkpoint(path)  # The one that `latest` names.
        return int(state["step"]) if loaded else 0

    def train(step: int) -> torch.Tensor:
        loss = engine(draw(step, 256)).square().mean()
        engine.backward(loss)
        engine.step()
        return loss

    def save(step: int) -> None:
        engine.save_checkpoint(OUT, client_state={"step": step})

    loop(load, save, train, lambda: OUT)


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[f"train_{FORM}"]()
