"""The GPT of `examples/gpt` by torch's pipelining under torchrun, as a user of Varuna's kind does.

    torchrun --nproc-per-node=N bench/scripts/gpt_relaunched.py FOLDER STAGES PLACES

It trains what `examples/elastic_gpt.py` trains by its defaults, and goes on from what the launch
before has saved in FOLDER. PLACES are those of the N ranks (0,1,3).
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from perdure_lab.live.paced import SAMPLES, Cut, train_cut

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "examples" / "gpt")]
from data import Windows, read_text  # noqa: E402
from elastic_gpt import loss_of  # noqa: E402
from model import GPT  # noqa: E402

LAYERS, WIDTH, CONTEXT, MICRO_BATCHES = 4, 128, 64, 8


def make_cut() -> Cut:
    """Return the model, and what it is trained with."""
    torch.manual_seed(1)
    data = Windows(read_text(), CONTEXT)

    def load(step: int, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        first = [(step * MICRO_BATCHES + number) * SAMPLES for number in numbers]
        rows = [data[(at + k) % len(data)] for at in first for k in range(SAMPLES)]
        return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])

    return Cut(
        list(GPT(layers=LAYERS, width=WIDTH, heads=4, context=CONTEXT)),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01),
        load,
        loss_of,
        MICRO_BATCHES,
    )


if __name__ == "__main__":
    folder, stages, places = sys.argv[1:]
    train_cut(Path(folder), make_cut(), int(stages), [int(place) for place in places.split(",")])
