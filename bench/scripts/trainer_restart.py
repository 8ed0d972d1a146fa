"""A Trainer's script that tells when it came to its first own line, and when it made a step.

usage: trainer_restart.py plain|huggingface|lightning
"""

import sys
import time

print(f"LINE {time.time()}", flush=True)
STEPS, PAUSE_S = 100_000, 0.05


def tell_step(made: int) -> None:
    """Tell of the first step of this process, and make no more than 20 a second."""
    if made == 1:
        print(f"STEP {time.time()}", flush=True)
    time.sleep(PAUSE_S)


def train_plain() -> None:
    """Train by a loop of its own."""
    import torch

    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    for made in range(1, STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        tell_step(made)


def train_huggingface() -> None:
    """Train a small BERT by the Trainer of transformers."""
    import torch
    from torch.utils.data import TensorDataset
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class Tell(TrainerCallback):
        made = 0

        def on_step_end(self, *_: object, **__: object) -> None:
            self.made += 1
            tell_step(self.made)

    rows = torch.randint(0, 100, (4000, 16))
    data = TensorDataset(rows, rows[:, 0] % 2)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=100,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
        )
    )

    def collate(batch: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
        ids, labels = (torch.stack(column) for column in zip(*batch, strict=True))
        return {"input_ids": ids, "labels": labels}

    options = TrainingArguments(
        "trainer-out",
        max_steps=STEPS,
        per_device_train_batch_size=4,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(
        model=model, args=options, train_dataset=data, data_collator=collate, callbacks=[Tell()]
    ).train()


def train_lightning() -> None:
    """Train a layer by Lightning's Trainer."""
    import lightning
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    class Module(lightning.LightningModule):
        made = 0

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(16, 1)

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

        def on_train_batch_end(self, *_: object) -> None:
            self.made += 1
            tell_step(self.made)

    loader = DataLoader(TensorDataset(torch.randn(4000, 16)), batch_size=4)
    lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), loader)


if __name__ == "__main__":
    {"plain": train_plain, "huggingface": train_huggingface, "lightning": train_lightning}[
        sys.argv[1]
    ]()
