"""Training scripts as people write them, by kind: none of them is run here."""

STEPS = '''\
"""A small regression with DDP."""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    net = torch.nn.Linear(32, 1)
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    for step in range(args.steps):
        x = torch.randn(64, 32)
        loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sched.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

EPOCHS = """\
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.cuda.amp import GradScaler
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

model = nn.Linear(4, 1).to("cpu")
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
loader = DataLoader(data, batch_size=8, shuffle=True)
optimizer = optim.SGD(model.parameters(), lr=0.1)
scheduler = optim.lr_scheduler.StepLR(optimizer, 3)
scaler = GradScaler()

for epoch in tqdm(range(10)):
    total = 0.0
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        total += loss.item()
    scheduler.step()
    print("epoch", epoch, "loss", total / len(loader))
    torch.save(model.state_dict(), "model.pt")
"""

HUGGINGFACE = """\
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainingArguments,
)


class Weighted(Trainer):
    def compute_loss(self, model, inputs, **options):
        return super().compute_loss(model, inputs, **options)


def main():
    model = AutoModelForCausalLM.from_pretrained("gpt2")
    model.train()
    trainer = Weighted(model=model, args=TrainingArguments("out"), train_dataset=[])
    result = trainer.train()
    trainer.save_model()


main()
"""

LIGHTNING = """\
import lightning as L
import torch


class Net(L.LightningModule):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


if __name__ == "__main__":
    trainer = L.Trainer(max_epochs=3)
    trainer.fit(Net(), torch.utils.data.DataLoader([]))
"""

FSDP2 = STEPS.replace(
    "from torch.nn.parallel import DistributedDataParallel as DDP",
    "from torch.distributed.fsdp import fully_shard",
).replace("    model = DDP(net)\n", "    model = net\n    fully_shard(model)\n")
FSDP1 = STEPS.replace(
    "from torch.nn.parallel import DistributedDataParallel as DDP",
    "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP",
).replace("DDP(net)", "FSDP(net)")
TORCHFT = """\
import torch
from torchft import DistributedDataParallel, Manager, Optimizer

manager = Manager(min_replica_size=1)
"""
PERDURE = "import perdure\n\nrun = perdure.init()\n"
ACCELERATE = """\
import torch
from accelerate import Accelerator

accelerator = Accelerator()
model, optimizer = accelerator.prepare(torch.nn.Linear(1, 1), None)
"""
SPAWN = STEPS.replace(
    "import torch\n", "import torch\nimport torch.multiprocessing as mp\n"
).replace('__main__":\n    main()', '__main__":\n    mp.spawn(main, nprocs=2)')
