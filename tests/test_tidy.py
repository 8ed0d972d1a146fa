"""Functions stay small; what a person can set, call or meet is documented."""

import ast
import inspect
import itertools
import re
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import perdure.model.bus.wire as wire
import perdure.model.events as events
import perdure.model.job as job
import perdure.model.orders as orders
from perdure.cli.app import load_command
from perdure.cli.commands import COMMANDS
from perdure.cli.main import PARTS
from perdure.cli.running.torchrun import REFUSED

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [p for name in ("src", "lab/src") for p in sorted((ROOT / name).rglob("*.py"))]
ALL = [
    *SOURCES,
    *(p for name in ("tests", "examples", "bench") for p in sorted((ROOT / name).rglob("*.py"))),
]
DOCUMENTS = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "GLOSSARY.md"]
DOCUMENTS += sorted((ROOT / "docs").rglob("*.md"))
FUNCTION_LINES_MAX = 70


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return all functions, also those within others; no expression holds one."""
    inside: list[ast.AST] = [ast.parse(path.read_text())]
    while inside:
        node = inside.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        for held in ("body", "orelse", "finalbody", "handlers", "cases"):
            inside += getattr(node, held, ())


def test_functions_fit_a_screen() -> None:
    """A file has no such bound: it ends where its concept ends."""
    long = []
    for path in ALL:
        for node in functions(path):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {length} lines")
    assert long == []


def test_modules_of_tests_can_be_told_apart() -> None:
    """Where a directory is no package, pytest knows a module by its name alone."""
    loose = [p for p in sorted((ROOT / "tests").rglob("test_*.py")) if not packaged(p)]
    names = Counter(path.name for path in loose)
    assert [path for path in loose if names[path.name] > 1] == []


def packaged(path: Path) -> bool:
    return (path.parent / "__init__.py").exists()


def test_nothing_is_left_to_do() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|\bNotImplementedError\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in ALL
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if marks.search(line)
    ]
    assert found == []


def field_docs(module: typing.Any) -> dict[str, set[str]]:
    """Return class -> fields that have a docstring below them."""
    found: dict[str, set[str]] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef):
            names = found.setdefault(node.name, set())
            for field, below in zip(node.body, node.body[1:], strict=False):
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(field.target, ast.Name)
                    and isinstance(below, ast.Expr)
                    and isinstance(below.value, ast.Constant)
                ):
                    names.add(field.target.id)
    return found


CONFIGS = [
    "DetectConfig",
    "CheckpointConfig",
    "RestartConfig",
    "PolicyConfig",
    "TorchftConfig",
    "NatsConfig",
    "NotifyConfig",
    "PreemptionConfig",
    "AlertsConfig",
    "MetricsConfig",
    "TrackingConfig",
    "LaunchConfig",
    "JobSpec",
]


@pytest.mark.parametrize("config", CONFIGS)
def test_every_setting_is_documented_where_it_is_defined(config: str) -> None:
    fields = set(getattr(job, config).__struct_fields__)
    described = msgspec.structs.fields(getattr(job, config))
    sections = {field.name for field in described if isinstance(field.default, msgspec.Struct)}
    assert fields - field_docs(job)[config] - sections == set()


@pytest.mark.parametrize("module", [events, orders, wire], ids=lambda m: m.__name__)
def test_every_event_action_and_message_is_documented(module: typing.Any) -> None:
    types = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, msgspec.Struct)
        and value.__module__ == module.__name__
    ]
    assert types
    assert [t.__name__ for t in types if not (t.__doc__ or "").strip()] == []


def test_every_event_is_one_the_controller_may_meet() -> None:
    listed = {t.__name__ for t in typing.get_args(events.AnyEvent)}
    defined = {
        name
        for name, value in vars(events).items()
        if isinstance(value, type)
        and issubclass(value, events.Event)
        and not value.__subclasses__()  # A base of some.
    }
    assert defined == listed


def test_every_environment_variable_is_documented() -> None:
    used: dict[str, str] = {}
    for path in SOURCES:
        for name in re.findall(r"[\"']_?(PERDURE_[A-Z_]+)[\"'=]", path.read_text()):
            used.setdefault(name, path.name)
    text = "\n".join(path.read_text() for path in DOCUMENTS)
    assert used
    assert {name: where for name, where in used.items() if name not in text} == {}


def commands(group: typing.Any = None) -> dict[str, typing.Any]:
    """Return all commands by name; those of a group as `group command`."""
    found = {}
    inner_of = group.commands if group else {name: load_command(name) for name in COMMANDS}
    for name, command in inner_of.items():
        if hasattr(command, "commands"):
            found |= {f"{name} {inner}": c for inner, c in commands(command).items()}
        else:
            found[name] = command
    return found


def test_every_command_and_option_says_what_it_does() -> None:
    silent = []
    for name, command in commands().items():
        if not command.help:
            silent.append(name)
        for parameter in command.params:
            if not getattr(parameter, "help", None):
                silent.append(f"{name} {parameter.name}")
    assert silent == []


def test_every_command_speaks_json() -> None:
    without = [
        name
        for name, command in commands().items()
        if not any("--json" in parameter.opts for parameter in command.params)
    ]
    assert without == []


def test_every_command_is_in_the_exit_code_table() -> None:
    text = (ROOT / "docs" / "exit-codes.md").read_text()
    assert [name for name in commands() if f"`{name}`" not in text] == []
    assert set(PARTS) == {"controller", "agent", "keeper", "zygote", "lighthouse", "relay"}


def torchrun_options() -> set[str]:
    run = pytest.importorskip("torch.distributed.run")
    return {
        option
        for action in run.get_args_parser()._actions
        for option in action.option_strings
        if option.startswith("--") and "_" not in option and option != "--help"
    }


def test_every_option_of_torchrun_is_taken_or_refused_and_in_the_table() -> None:
    taken = {opt for p in commands()["run"].params for opt in p.opts if opt.startswith("--")}
    options = torchrun_options()
    assert options - taken == set(REFUSED)
    rows = re.findall(
        r"^\| `(--[a-z-]+)`.*\| (same|accepted|refused) \|",
        (ROOT / "docs" / "torchrun.md").read_text(),
        re.MULTILINE,
    )
    table = dict(rows)
    assert set(table) == options
    assert {name for name, word in table.items() if word == "refused"} == set(REFUSED)


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for path in [*DOCUMENTS, ROOT / "CHANGELOG.md"]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            if not (path.parent / target).exists():
                broken.append(f"{path.name}: {target}")
    assert broken == []


def test_every_document_is_in_the_index() -> None:
    folder = ROOT / "docs"
    listed = set(re.findall(r"\]\(([a-z0-9/_-]+\.md)\)", (folder / "README.md").read_text()))
    pages = {str(path.relative_to(folder)) for path in folder.rglob("*.md")}
    assert listed == pages - {"README.md"}


def test_options_in_the_documents_exist() -> None:
    table, wrong = commands(), []
    for path in DOCUMENTS:
        for line in re.findall(
            r"^(?: {4}|\$ )(?:\$ )?perdure (.*)", path.read_text(), re.MULTILINE
        ):
            words = re.split(r" {3,}|[#|;&<>]", line)[0].split()
            known = table.get(" ".join(words[:2])) or table.get(words[0] if words else "")
            if known is None:
                continue
            options = {opt for p in known.params for opt in p.opts} | {"--help"}
            own = itertools.takewhile(lambda word: not word.endswith(".py"), words[1:])
            used = {word.partition("=")[0].strip("[]") for word in own if word.startswith("--")}
            wrong += [f"{path.name}: perdure {line}: {name}" for name in sorted(used - options)]
    assert wrong == []
