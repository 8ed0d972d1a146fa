"""Saves at every step as a library does it, and resumes as its documents say.

Arguments: the library, the number of steps from one save to the next (1), and the seconds that a
step takes (0). Rank 0 writes what each life did into `trail`, and the loss of each step into
`losses`. A script that SIGUSR2 tells to go saves after the step in progress, as submitit's users
have it.
"""

import glob
import os
import re
import signal
import sys
import time

import torch
import torch.distributed as dist

FORM, OUT, WIDTH = sys.argv[1], "out", 1 << 20
EVERY, PACE_S = int([*sys.argv, "1"][2]), float([*sys.argv, "1", "0"][3])
told: list[int] = []
"""Signals to go."""


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


def must_leave() -> bool:
    """Return whether a rank has a signal to go."""
    flag = torch.tensor([float(bool(told))])
    if dist.is_initialized():
        dist.all_reduce(flag, dist.ReduceOp.MAX)
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
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    class Small(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(512, 512)

        def training_step(self, batch, _):
            step = self.global_step + 1
            time.sleep(PACE_S)
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
    slurm = "SLURM_JOB_ID" in os.environ
    trainer = lightning.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", max_steps=-1,
        max_epochs=-1, callbacks=[saver], logger=False, enable_progress_bar=False,
        plugins=[SLURMEnvironment(auto_requeue=True)] if slurm else [],
        default_root_dir=OUT,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(torch.randn(512, 512), batch_size=4)
    # Without a path, it begins at what it has saved for Slurm.
    trainer.fit(Small(), loader, ckpt_path=None if slurm else "last")


def loop(load, save, train=None, find=find_newest) -> None:
    """Make steps by `train` and save by `save`, from where `load` says."""
    signal.signal(signal.SIGUSR2, lambda number, _: told.append(number))
    path = find()
    step = load(path) if path else 0
    tell("began", step)
    leaves = False
    while not is_enough() and not leaves:
        step += 1
        time.sleep(PACE_S)
        if train:
            note(step, train(step))
        leaves = must_leave()
        if step % EVERY and not leaves:
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


class Stated:
    """State of one kind for torchtitan's manager."""

    def __init__(self, state_dict, load_state_dict) -> None:
        self.state_dict, self.load_state_dict = state_dict, load_state_dict


def train_torchtitan() -> None:
    """Use its manager of checkpoints; its trainer wants a GPU."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.checkpointer import CheckpointManager

    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = torch.nn.Linear(512, 512)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model.set_force_sum_reduction_for_comms(True)  # Gloo has no other one.
    optimizer = torch.optim.AdamW(model.parameters())
    flat, now = StateDictOptions(flatten_optimizer_state_dict=True), {"step": torch.tensor(0)}
    manager = CheckpointManager(
        CheckpointManager.Config(enable=True, folder=OUT, interval=EVERY, keep_latest_k=4),
        dataloader=Stated(dict, lambda state: None),
        model_parts=[model],
        optimizers=Stated(
            lambda: get_optimizer_state_dict(model, optimizer, options=flat),
            lambda state: set_optimizer_state_dict(model, optimizer, state, options=flat),
        ),
        lr_schedulers=Stated(dict, lambda state: None),
        states={"train_state": Stated(lambda: now, now.update)},
        sd_adapter=None,
    )

    def load(path: str) -> int:
        manager.load()
        return int(now["step"])

    def train(step: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(draw(step, 512)).square().mean()
        loss.backward()
        optimizer.step()
        now["step"] = torch.tensor(step)
        return loss

    loop(load, manager.save, train, lambda: OUT)
    manager.close()


def load_timm_saver():
    """Return the module of timm's saver, as it is published; the rest wants torchvision."""
    import importlib.util
    import types

    folder = os.path.dirname(importlib.util.find_spec("timm").origin)
    names = ("timm", "timm.utils", "timm.utils.model")
    sys.modules |= {name: types.ModuleType(name) for name in names}
    vars(sys.modules[names[-1]]).update(
        unwrap_model=lambda model: model.module,
        get_state_dict=lambda model, unwrap: unwrap(model).state_dict(),
    )
    spec = importlib.util.spec_from_file_location(
        "timm.utils.checkpoint_saver", f"{folder}/utils/checkpoint_saver.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train_timm() -> None:
    """Use its saver: `last.pth.tar` and the newest numbered file are one file with two names."""
    saver_module = load_timm_saver()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    os.makedirs(OUT, exist_ok=True)
    saver = saver_module.CheckpointSaver(model, optimizer, checkpoint_dir=OUT, max_history=4)

    def load(path: str) -> int:
        state = torch.load(path)
        model.module.load_state_dict(state["state_dict"])
        optimizer.load_state_dict(state["optimizer"])
        saver.load_state_dict(state["saver"])
        return int(state["epoch"])

    def train(step: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(draw(step, 512)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def save(step: int) -> None:
        if dist.get_rank() == 0:
            saver.save_checkpoint(step)

    last = f"{OUT}/last.pth.tar"
    loop(load, save, train, lambda: last if os.path.exists(last) else "")


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[f"train_{FORM}"]()
