"""What is proposed for scripts as people write them; nothing, where it might be wrong."""

import ast
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.cli.adopting import scripts
from tests.waiting import PATIENCE_S

from perdure.cli.adopting.change import propose_change
from perdure.cli.adopting.edits import Change, render_diff
from perdure.cli.adopting.script import Reading


def propose(text: str) -> Change:
    return propose_change(Reading(text))


def added(text: str) -> list[str]:
    change = propose(text)
    assert change.text, change.why
    diff = render_diff("train.py", text, change.text).splitlines()[2:]
    return [line[1:].strip() for line in diff if line.startswith("+")]


def test_a_loop_over_steps() -> None:
    assert added(scripts.STEPS) == [
        "import perdure",
        "run = perdure.init()",
        "run.register(model=model, optimizer=optimizer, sched=sched)",
        "for step in run.steps(args.steps):",
        "run.log(loss=loss.item())",
    ]


def test_a_loop_over_epochs_with_a_scaler() -> None:
    assert added(scripts.EPOCHS) == [
        "import perdure",
        "run = perdure.init()",
        "run.register(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)",
        "for epoch in tqdm(run.steps(10)):",
        "run.log(loss=loss.item())",
    ]
    words = " ".join(propose(scripts.EPOCHS).by_hand)
    assert "below line 23 logs the loss of an epoch's last batch" in words
    assert "nothing is seeded" in words
    assert "a preemption with a shorter notice. A stop waits for the epoch's end" in words
    assert "run.batches(" in words
    assert "line 26 saves is not needed" in words


def log_lines(text: str) -> list[str]:
    """Return the lines around the one that logs the loss in the proposed script."""
    lines = propose(text).text.splitlines()
    (at,) = (n for n, line in enumerate(lines) if ".log(" in line)
    return lines[at - 1 : at + 2]


EPOCHS_UNSHOWN = scripts.EPOCHS.replace("        total += loss.item()\n", "").replace(
    '    print("epoch", epoch, "loss", total / len(loader))\n', ""
)


def test_where_a_step_is_an_epoch_the_loss_is_logged_once_an_epoch() -> None:
    assert log_lines(scripts.EPOCHS) == [
        "        total += loss.item()",
        "    run.log(loss=loss.item())",
        "    scheduler.step()",
    ]
    assert log_lines(EPOCHS_UNSHOWN)[1] == "    run.log(loss=loss.item())", "though none is shown"


@pytest.mark.parametrize(
    ("loss", "logged"),
    [
        ("        with torch.autocast('cpu'):\n            loss = F.mse_loss(model(x), y)\n", True),
        ("        y_hat, loss = train_on(model, x, y)\n", True),
        ("        if i:\n            loss = f(x)\n        else:\n            loss = f(y)\n", False),
    ],
)
def test_the_loss_is_logged_where_it_is_surely_there_behind_the_batches(
    loss: str, logged: bool
) -> None:
    change = propose(scripts.EPOCHS.replace("        loss = F.mse_loss(model(x), y)\n", loss))
    assert "for epoch in tqdm(run.steps(10)):" in change.text, change.why
    assert ("\n    run.log(loss=loss.item())\n" in change.text) is logged
    assert ("run.log(loss=...) in the loop" in " ".join(change.by_hand)) is not logged


def test_trainers() -> None:
    assert added(scripts.HUGGINGFACE) == [
        "import perdure.huggingface",
        "perdure.huggingface.attach(trainer)",
    ]
    assert added(scripts.LIGHTNING) == [
        "import perdure.lightning",
        "perdure.lightning.attach(trainer)",
    ]
    assert "LOCAL_WORLD_SIZE" in propose(scripts.LIGHTNING).by_hand[0]
    lines = propose(scripts.HUGGINGFACE).text.splitlines()
    assert lines.index("    perdure.huggingface.attach(trainer)") + 1 == lines.index(
        "    result = trainer.train()"
    )


def test_fsdp2_is_a_loop_like_any_other() -> None:
    assert "run.register(model=model, optimizer=optimizer, sched=sched)" in added(scripts.FSDP2)


def test_a_name_that_is_taken() -> None:
    text = scripts.STEPS.replace("    torch.manual_seed(1)", "    run = open('/dev/null')")
    assert "perdure_run.register(model=model, optimizer=optimizer, sched=sched)" in added(text)


def test_a_model_that_is_wrapped_under_another_name() -> None:
    text = scripts.STEPS.replace("model.parameters()", "net.parameters()")
    assert "run.register(model=model, optimizer=optimizer, sched=sched)" in added(text)


LOOP = "    for step in range(args.steps):\n"
STEP = "        optimizer.step()\n"
LOSS = "        loss.backward()\n"


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (LOOP, LOOP.replace("range(", "range(start, "), "does not count from 0"),
        (LOOP, "    for step in data:\n", "is not `for NAME in range(N):`"),
        (LOOP, "    step = 0\n    while step < 10:\n", "`while`"),
        (LOOP, "    it = iter([])\n" + LOOP + "        y = next(it)\n", "reads on in data"),
        (STEP, STEP + "        if loss < 0.1:\n            break\n", "leaves the loop"),
        (STEP, STEP + "        if loss < 0.1:\n            return\n", "leaves the loop"),
        ("    sched =", "    sched = None\n    sched =", "`sched` may be None"),
        ("    main()", "    for _ in range(3):\n        main()", "trains several times"),
        ("    main()", "    [main() for _ in range(3)]", "unknown number of times"),
        ("    main()", "    run_it(main)", "not called at one place"),
        ("def main():", "@cached\ndef main():", "has a decorator"),
        ("import torch\n", "import torch\nperdure = 1\n", "its own `perdure`"),
        (LOOP, LOOP.replace("args.steps", "args.steps - done"), "counts what is left"),
        (LOOP, "    optimizer.load_state_dict({})\n" + LOOP, "the script resumes by itself"),
    ],
)  # fmt: skip
def test_what_might_be_wrong_is_left_alone(old: str, new: str, why: str) -> None:
    """A person gets the five lines, with the places where they belong."""
    assert scripts.STEPS.count(old) == 1 or old == "import torch\n"
    change = propose(scripts.STEPS.replace(old, new, 1))
    assert not change.text
    assert why in change.why
    if "its own `perdure`" not in why:
        words = [line.partition(": ")[2].split()[0] for line in change.by_hand[-5:]]
        assert words[:2] == ["import", "run"]
        assert words[3:] == ["for", "run.log(loss=loss.item())"]


def test_lines_by_hand_have_the_numbers_of_the_script() -> None:
    change = propose(scripts.STEPS.replace(LOOP, LOOP.replace("range(", "range(start, ")))
    assert change.by_hand == (
        "below line 7: import perdure",
        "above line 20: run = perdure.init()",
        "above line 20: run.register(model=model, optimizer=optimizer, sched=sched)",
        "line 20: for step in run.steps(N):   # N counts all steps; it begins at the right one",
        "in the loop of line 20: run.log(loss=loss.item())",
    )


def test_a_call_in_a_function_that_the_file_does_not_call_is_none() -> None:
    """All official examples of transformers have such a `_mp_fn`."""
    text = scripts.STEPS.replace("if __name__", "def _mp_fn(index):\n    main()\n\n\nif __name__")
    assert "for step in run.steps(args.steps):" in added(text)
    text = text.replace('":\n    main()', '":\n    main()\n    _mp_fn(0)')
    assert "not called at one place" in propose(text).why


def test_a_best_metric_is_kept_in_six_lines() -> None:
    """They run as they are printed, once the first value is filled in."""
    text = scripts.STEPS.replace(LOOP, "    best = 9\n" + LOOP).replace(
        STEP, STEP + "        best = min(best, loss.item())\n"
    )
    change = propose(text)
    assert "for step in run.steps(args.steps):" in change.text
    (told,) = (word for word in change.by_hand if word.startswith("`best` would be reset"))
    lines = [line[4:] for line in told.splitlines()[1:]]
    registered: dict[str, Any] = {}
    names: dict[str, Any] = {"run": SimpleNamespace(register=registered.update)}
    names["run"].register = lambda **words: registered.update(words)
    exec("\n".join(lines).replace("best = ...", "best = 9"), names)
    kept = registered["kept"]
    kept.best = 3
    fresh = type(kept)()
    fresh.load_state_dict(kept.state_dict())
    assert fresh.best == 3


def test_an_unknown_object_that_steps_is_named() -> None:
    change = propose(scripts.STEPS.replace(STEP, STEP + "        ema.update(model)\n"))
    assert change.text
    assert any("run.register(ema=ema)" in word for word in change.by_hand)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (scripts.PERDURE, "calls perdure already"),
        (scripts.TORCHFT, "torchft"),
        (scripts.ACCELERATE, "accelerate"),
        (scripts.SPAWN, "makes processes of its own"),
        (scripts.FSDP1, "FSDP1"),
        ("import numpy\n", "does not import torch"),
        ("import torch\n", "no training loop found"),
        (scripts.HUGGINGFACE.replace('"out"', '"out", deepspeed="z.json"'), "deepspeed"),
        (
            scripts.HUGGINGFACE.replace("    trainer.save_model()", "    trainer.train()"),
            "2 calls of train()",
        ),
        (
            scripts.HUGGINGFACE.replace("transformers", "trl").replace("Trainer", "SFTTrainer"),
            "the trainers of trl",
        ),
        (
            scripts.LIGHTNING.replace("lightning as L", "pytorch_lightning as L"),
            "pytorch_lightning",
        ),
        (
            scripts.LIGHTNING.replace("max_epochs=3", 'strategy="deepspeed_stage_2"'),
            "deepspeed_stage_2",
        ),
        (scripts.STEPS + scripts.EPOCHS, "2 training loops"),
    ],
)
def test_other_kinds_are_told_in_words(text: str, why: str) -> None:
    change = propose(text)
    assert not change.text
    assert why in change.why


def test_what_is_only_shown_may_be_carried() -> None:
    text = scripts.STEPS.replace(LOOP, "    total, seen = 0.0, []\n" + LOOP).replace(
        STEP, STEP + "        total += loss.item()\n        seen.append(1)\n        print(total)\n"
    )
    assert "for step in run.steps(args.steps):" in added(text)


LAYOUTS = {
    "as it is": scripts.STEPS,
    "CRLF": scripts.STEPS.replace("\n", "\r\n"),
    "tabs": scripts.STEPS.replace("    ", "\t"),
    "no end": scripts.EPOCHS.rstrip("\n"),
    "no end where it is changed": scripts.LIGHTNING.rstrip("\n"),
    "letters of several bytes": scripts.STEPS.replace("range(", 'range(len("äöü€") * '),
    "other line breaks": scripts.STEPS.replace("# ", "").replace(
        "    torch.manual_seed(1)", '    s = "\\x0c" + "\x0c\x85\u2028"'
    ),
    "a range over lines": scripts.STEPS.replace("range(args.steps)", "range(\n  args\n  .steps\n)"),
}


@pytest.mark.parametrize("tool", [["patch", "-p0"], ["git", "apply"]], ids=" ".join)
@pytest.mark.parametrize("name", ["train.py", "my train.py"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_diff_is_taken_by_patch_and_git(
    layout: str, name: str, tool: list[str], tmp_path: Path
) -> None:
    if shutil.which(tool[0]) is None:
        pytest.skip(f"no {tool[0]} here")
    text = LAYOUTS[layout]
    change = propose(text)
    assert change.text, change.why
    (tmp_path / name).write_bytes(text.encode())
    diff = render_diff(name, text, change.text).encode()
    done = subprocess.run(tool, input=diff, cwd=tmp_path, capture_output=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / name).read_bytes() == change.text.encode()
    ast.parse(change.text)


def test_an_import_that_shares_its_last_line_with_a_text() -> None:
    """The line behind it is within that text, so that nothing can be put there."""
    imports, rest = scripts.EPOCHS.split("\n\n", 1)
    change = propose(imports + '; T = """\nimport x\n"""\n\n' + rest)
    assert not change.text
    assert "more than one statement" in change.why


def test_lines_that_end_in_a_carriage_return_alone() -> None:
    change = propose(scripts.STEPS.replace("\n", "\r"))
    assert not change.text
    assert "lines end in an unusual way" in change.why
