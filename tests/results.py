"""A drill's card and a replay's result, as these leave them."""

from perdure.drill.card import Card, FaultRow
from perdure.model.report import ACCOUNTS
from perdure_lab.report import ReplayResult, ReplayRow

CARD = Card(
    job="gpt", seed=0, ranks=2, nodes=1, declares_steps=True, passed=False, budget_s=600.0,
    drilled_s=80.0, undisturbed_s=20.0, starts=1, changed=("detect.hang_action_s = 5: why",),
    rows=(
        FaultRow(
            fault="crash", verdict="passed", what="rank 1: SIGKILL", step=57, found_s=0.02,
            found_as="signal 9 of rank 1", culprit_right=True, back_s=0.71, steps_redone=7,
            losses="equal", losses_why="12 steps",
        ),
        FaultRow(
            fault="stop", verdict="failed", what="rank 0: <SIGSTOP>", step=80, found_s=1.6,
            found_as="ComputeHang of rank 1", culprit_right=False, why="rank 0 was harmed",
        ),
        FaultRow(fault="node", verdict="not tried", why="the job has one node"),
    ),
)  # fmt: skip
REPLAY = ReplayResult(
    trace="t.csv", u1=100.0, u2=90.0, u2_online=80.0, duration_s=60.0, slot_s=110.0, seed=None,
    complete=True, nodes_max=2, speed=1.0, notice_s=0.0, throughput={"1": 1.0, "2": 2.0},
    counts=((0.0, 2), (30.0, 1)),
    systems=(
        ReplayRow(
            system="perdure", committed=72.0, fraction_of_u1=0.72, fraction_of_u2=0.8,
            fraction_of_u2_online=0.9, ledger=dict.fromkeys(ACCOUNTS, 0.0) | {"useful": 1.0},
            losses=1, joins=0, steps_again=0, longest_gap_s=1.5, load=0.5,
            rates=((0.0, 2.0), (30.0, 0.0), (31.5, 1.0)), pace=1.01,
        ),
    ),
)  # fmt: skip
