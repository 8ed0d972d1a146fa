"""Traps of platforms: a row each, and facts on both sides of each that is looked for."""

import ast
import importlib
import os
import re
from pathlib import Path
from typing import Any

import pytest
from tests.unit.traps.trap_tests import TESTS

from perdure.model.platforms.box import BoxFacts, Disk, Gpu
from perdure.traps import SYMPTOMS, TRAPS, find_trap, judge, name_symptoms
from perdure.traps.table import render_table

ROOT = Path(__file__).resolve().parents[3]
GB = 1 << 30
ROOMY = Disk(role="state", path="/x", kind="ext4", free=900 * GB, total=1000 * GB,
             inodes_free=9_000_000, inodes=10_000_000)  # fmt: skip
CARD = Gpu(uuid="GPU-1")
CLUSTER = {"PreemptType": "preempt/partition_prio", "AccountingStorageType": "x/slurmdbd"}

# Trap, facts in which it lies ahead, facts in which it does not.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "GEN2": ({"ancestors": ("bash", "sshd", "sshd", "systemd")},
             {"ancestors": ("bash", "tmux: server", "sshd")}),
    "GEN3": ({}, {"rsync": True}),
    "GEN4": ({"crlf": ("run.sh",)}, {}),
    "GEN7": ({"gpus": (Gpu(uuid="a", pids=(7,)),)}, {"gpus": (CARD,)}),
    "GEN10": ({"open_files": 1024}, {"open_files": 65536}),
    "SLURM2": ({"slurm": CLUSTER},
               {"slurm": {**CLUSTER, "SlurmctldParameters": "preempt_send_user_signal"}}),
    "SLURM2b": ({"slurm": {"JobRequeue": "0"}}, {"slurm": {"JobRequeue": "1"}}),
    "SLURM4": ({"slurm": {"AccountingStorageType": "accounting_storage/none"}},
               {"slurm": CLUSTER}),
    "SLURM5": ({"disks": (Disk(role="checkpoints", path="/tmp/x"),), "slurm": CLUSTER},
               {"disks": (ROOMY,), "slurm": CLUSTER}),
    "K8S6": ({"torch_cuda": "12.8"}, {"torch_cuda": "12.8", "gpus": (CARD,)}),
    "NB3": ({"torch_cuda": "12.8", "env": {"CUDA_VISIBLE_DEVICES": ""}},
            {"torch_cuda": "12.8", "gpus": (CARD,)}),
    "NB4": ({"disks": (Disk(role="state", path="/work", kind="overlay"),)}, {"disks": (ROOMY,)}),
    "U6": ({"disks": (Disk(role="checkpoints", path="/x", free=GB, total=50 * GB),)},
           {"disks": (ROOMY,)}),
    "U7": ({"disks": (Disk(role="state", path="/x", inodes=200_000, inodes_free=900),)},
           {"disks": (ROOMY,)}),
    "U9": ({"memory_limit": 10 * GB, "memory_used": 9 * GB},
           {"memory_limit": 10 * GB, "memory_used": GB}),
    "U10": ({"gpus": (CARD,)},
            {"gpus": (CARD,), "env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}),
    "U26": ({"crlf": ("a.sh", "b.slurm")}, {}),
    "U28": ({"torch_cuda": "13.0", "driver_cuda": "12.4"},
            {"torch_cuda": "12.8", "driver_cuda": "12.4"}),
    "U31": ({"torch": "2.13.0+cpu", "gpu_nodes": 2}, {"torch_cuda": "12.8", "gpus": (CARD,)}),
    "U41": ({"oom_kills": 2}, {"oom_kills": 0}),
    "U44": ({"system": "Windows"}, {}),
    "MN1": ({"nvswitch": True}, {"nvswitch": True, "fabric_manager": True}),
}  # fmt: skip
LEFT = {
    "U6": "RuntimeError: [enforce fail at inline_container.cc:668] . unexpected pos 64 vs 0",
    "U7": "OSError: [Errno 28] No space left on device: mkdir '/x' ",
    "U9": "RuntimeError: DataLoader worker (pid 41) is killed by signal: Killed.",
    "U10": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "GEN4": "run.sh: line 2: $'\\r': command not found",
    "U28": "CUDA error: no kernel image is available for execution on the device",
    "U31": "RuntimeError: Found no NVIDIA driver on your system.",
    "U44": "if you are going to freeze_support() the program",
    "U46": "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",
    "MN1": "RuntimeError: system not yet initialized (error 802)",
    "MN3": "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)",
    "SLURM4": "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0",
    "SLURM2": "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01 DUE TO TIME LIMIT ***",
    "K8S5": "Pod ephemeral local storage usage exceeds the total limit of containers 20Mi.",
    "GEN10": "OSError: [Errno 24] Too many open files",
}


def states(facts: dict[str, Any]) -> dict[str, str]:
    scopes = frozenset({"any", "ssh", "slurm", "kubernetes", "notebook", "nodes"})
    return {trap.id: check.state for trap, check in judge(BoxFacts(**facts), scopes)}


@pytest.mark.parametrize("trap", CASES)
def test_a_check_sees_its_trap_and_only_there(trap: str) -> None:
    ahead, clear = CASES[trap]
    assert states(ahead)[trap] in ("degraded", "note")
    assert states(clear)[trap] == "ok"


def test_every_check_has_a_case_and_every_symptom_its_words() -> None:
    assert {trap.id for trap, check in TRAPS if check is not None} == set(CASES)
    assert {symptom.trap for symptom in SYMPTOMS} == set(LEFT)


@pytest.mark.parametrize("trap", LEFT)
def test_what_a_process_left_names_the_trap(trap: str) -> None:
    ((symptom, line),) = name_symptoms(["step 7 loss 0.3", LEFT[trap], "  "])
    assert (symptom.trap, line) == (trap, LEFT[trap].strip())


def test_ordinary_output_speaks_of_no_trap() -> None:
    lines = ["epoch 3: loss 0.31", "saved step-100", "ValueError: bad lr", "killing time"]
    assert name_symptoms(lines) == ()


def test_all_traps_of_the_profile_are_there() -> None:
    wanted = {f"GEN{n}" for n in range(1, 9)} | {f"SLURM{n}" for n in range(1, 6)}
    wanted |= {f"K8S{n}" for n in range(1, 7)} | {f"NB{n}" for n in range(1, 6)}
    ids = [trap.id for trap, _ in TRAPS]
    assert len(ids) == len(set(ids))
    assert wanted - set(ids) == set()


def test_what_meets_a_trap_exists() -> None:
    for trap, _ in TRAPS:
        assert trap.how, trap.id
        for how in trap.how.values():
            module, _, name = how.partition(":")
            assert hasattr(importlib.import_module(module), name), f"{trap.id}: {how}"
    for symptom in SYMPTOMS:
        assert "diagnosed" in find_trap(symptom.trap).how, symptom.trap


def test_what_a_check_before_a_launch_names_is_a_trap_of_the_table() -> None:
    named = {
        trap
        for room in ("launch", "model/platforms")
        for path in (ROOT / "src/perdure" / room).rglob("*.py")
        if path.name != "tensorfiles.py"  # Whose types of numbers have such names too.
        for trap in re.findall(r'"((?:GEN|SLURM|K8S|NB|MN|U)\d+[a-z]?)"', path.read_text())
    }
    assert {"GEN1", "SLURM2b", "K8S4", "NB4", "U34"} <= named
    for trap in named:
        assert find_trap(trap).id == trap


def test_whatever_meets_a_trap_has_a_test_that_is_there() -> None:
    in_cases = ("perdure.traps.checks", "perdure.traps.symptoms")
    for trap, _ in TRAPS:
        own = {when for when, how in trap.how.items() if not how.startswith(in_cases)}
        assert set(TESTS.get(trap.id, {})) == own, trap.id
    for where in {where for row in TESTS.values() for where in row.values()}:
        path, _, name = where.partition("::")
        tree = ast.parse((ROOT / "tests" / path).read_text())
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        assert name in {node.name for node in tree.body if isinstance(node, functions)}, where


def test_the_comparison_with_others_counts_what_it_shows() -> None:
    text = (ROOT / "docs" / "doctor.md").read_text().partition("## Beside others")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")]
            for line in text.splitlines() if line.startswith("| ")]  # fmt: skip
    header, *traps, totals = rows
    assert header == ["trap", "SkyPilot", "dstack", "TorchX", "submitit", "perdure"]
    profile = [trap for trap, _ in TRAPS if re.fullmatch(r"(GEN[1-8]|SLURM\d|K8S\d|NB\d)", trap.id)]
    assert [(row[0], row[5]) for row in traps] == [(t.id, str(len(t.how))) for t in profile]
    columns = list(zip(*traps, strict=True))
    counted = [f"{c.count('yes')}, partly {c.count('partly')}" for c in columns[1:5]]
    met = sum(bool(trap.how) for trap in profile)
    assert totals == [f"met, of {len(profile)}", *counted, str(met)]


def test_the_table_in_the_documents_is_the_code() -> None:
    path = ROOT / "docs" / "doctor.md"
    text = path.read_text()
    made = re.sub(
        r"(<!-- traps -->\n).*(<!-- end -->)",
        lambda m: m[1] + render_table() + m[2],
        text,
        flags=re.DOTALL,
    )
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(made)
    assert made == path.read_text(), "UPDATE_GOLDEN=1 writes it anew"
