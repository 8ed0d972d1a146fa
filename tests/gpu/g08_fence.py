"""G8: a micro-batch has the same bits each time and everywhere, and what the fence costs.

Passes where 50 passes of one micro-batch, in two processes, leave one set of gradients, and a step
whose update is launched only once its sum was seen to have ended is at most 1 % longer than one
whose update follows on the device, at equal losses.
"""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from examples.gpt.model import GPT
from torch import Tensor, nn

from perdure.worker.elastic.group import Group
from perdure.worker.elastic.moving import hash_tensors
from tests.contract.communicator_ranks import Rank
from tests.gpu.kit import Trial
from tests.gpu.ranks import fork_ranks

COST_MAX = 0.01
SEED = 11


def run(trial: Trial) -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    times = trial.choose(50, 4)

    def repeat(rank: Rank) -> None:
        one = Trainee(trial)
        rank.answer([one.hash_gradients() for _ in range(times)])

    found = fork_ranks(trial, repeat, limit_s=trial.choose(25.0, 60.0))
    bits = [one for mine in found.values() for one in mine]
    trial.note(passes=len(bits), bits=sorted(set(bits)))
    trial.check(len(bits) == 2 * times, f"only {len(bits)} passes")
    trial.check(len(set(bits)) == 1, f"{len(set(bits))} sets of gradients")
    costs = fork_ranks(trial, lambda rank: rank.answer(measure(trial, rank)), size=1)[0]
    trial.note(**costs)
    trial.took(costs["fenced_s"])
    trial.check(costs["waits"] > 0, "no step has waited")
    trial.check(costs["equal_losses"], "the losses with and without the fence differ")
    cost = costs["fenced_s"] / costs["plain_s"] - 1.0
    trial.check(cost <= trial.choose(COST_MAX, 1e9), f"the fence costs {cost:.1%}")


class Trainee:
    """A GPT of 100 million parameters; on the CPU a small one."""

    def __init__(self, trial: Trial) -> None:
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(SEED)
        layers, width, heads, context = trial.choose((14, 768, 12, 512), (2, 32, 2, 16))
        self.trial = trial
        self.model = GPT(layers=layers, width=width, heads=heads, context=context)
        self.model.to(trial.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        shape = trial.choose(8, 2), context + 1
        self.tokens = torch.randint(256, shape).to(trial.device)

    def compute(self) -> Tensor:
        """Return the loss of the micro-batch; its gradients are there."""
        torch.manual_seed(SEED)  # As the loop does before each micro-batch, for dropout.
        self.optimizer.zero_grad()
        logits = self.model(self.tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    def hash_gradients(self) -> str:
        self.compute()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        assert all(bool(grad.isfinite().all()) and bool(grad.any()) for grad in grads[:3])
        return hash_tensors([grad.cpu() for grad in grads])


def measure(trial: Trial, rank: Rank) -> dict[str, Any]:
    """Return the seconds of a step with and without the fence, in turns; each its own model."""
    group = rank.group("fence")
    group.comm = rank.connect(rank.store, 0, 1, lambda: False)  # An engine, though it is alone.
    ends = rank.make(1.0)
    waits = 0

    def fence() -> None:
        nonlocal waits
        group.all_reduce(ends)
        group.wait()
        waits += 1

    def follow() -> None:
        comm: Any = group.comm
        if not trial.dry:
            comm._backend.allreduce([ends]).wait()  # Its stream follows: the CPU does not wait.

    fenced, plain = Trainee(trial), Trainee(trial)
    seconds: dict[str, list[float]] = {"fenced": [], "plain": []}
    losses: dict[str, list[float]] = {"fenced": [], "plain": []}
    for number in range(trial.choose(9, 3)):
        for name, one, between in (("fenced", fenced, fence), ("plain", plain, follow)):
            spent_s, made = train(one, between, trial.choose(10, 2))
            losses[name] += made
            if number:  # The first round warms up.
                seconds[name].append(spent_s)
    close(group)
    return {
        "fenced_s": statistics.median(seconds["fenced"]),
        "plain_s": statistics.median(seconds["plain"]),
        "parameters": sum(p.numel() for p in fenced.model.parameters()),
        "equal_losses": losses["fenced"] == losses["plain"],
        "waits": waits,
    }


def train(one: Trainee, between: Callable[[], object], steps: int) -> tuple[float, list[float]]:
    """Return the seconds of a step, and the losses; nothing else waits for the device."""
    if not one.trial.dry:
        torch.cuda.synchronize()
    began_s, made = time.perf_counter(), []
    for _ in range(steps):
        made.append(one.compute())
        between()
        one.optimizer.step()
    if not one.trial.dry:
        torch.cuda.synchronize()
    return (time.perf_counter() - began_s) / steps, [loss.item() for loss in made]


def close(group: Group) -> None:
    group.give_up()
    assert group.comm.drained(5.0), "something is under way"
