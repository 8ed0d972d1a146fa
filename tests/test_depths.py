"""What is asked of a job's depth outside the places that are made for it: fewer each time.

A depth (supervised, resumable, torchft, elastic, only observed) is known to `control/membership`
and to the trainers. Each question of it elsewhere is a place that the next feature has to be
written into again. `MOST` may only fall.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import perdure

SOURCE = Path(perdure.__file__).parent
ATTRIBUTES = {"torchft", "of_replicas", "elastic", "depth", "observe", "observed"}
FUNCTIONS = {"is_elastic", "is_torchft", "is_observed", "is_in_place"}
DEPTHS = {"supervised", "resumable", "torchft", "elastic"}
MADE_FOR_IT = (
    "cli/adopting/",  # `perdure init` says which depth a script is made for.
    "control/membership/",
    "worker/elastic/",
    "worker/torchft/",
    "worker/trainers/",
)
SETTINGS = {"bind", "held", "port"}
"""Fields of a depth's section: who reads one asks nothing of the depth."""
MOST = {"control": 0, "elsewhere": 18}


def find_questions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, what is asked) of each read of the depth."""
    nodes = list(ast.walk(tree))
    settings = {n.value for n in nodes if isinstance(n, ast.Attribute) and n.attr in SETTINGS}
    settings |= {  # Of which a copy is made, with another value.
        n.args[0]
        for n in nodes
        if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "replace" and n.args
    }
    for node in nodes:
        match node:
            case ast.Attribute() if node in settings:
                pass
            case ast.Attribute(attr=name, ctx=ast.Load()) if name in ATTRIBUTES:
                yield node.lineno, f".{name}"
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in FUNCTIONS:
                yield node.lineno, f"{name}()"
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=name), *_]):
                if name in ATTRIBUTES:
                    yield node.lineno, f'getattr "{name}"'
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
                names = {each.id for each in ast.walk(kinds) if isinstance(each, ast.Name)}
                if any(name.startswith(("Elastic", "Torchft")) for name in names):
                    yield node.lineno, f"isinstance {names}"
            case ast.Compare() | ast.MatchValue():
                values = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant))
                for value in values:
                    if isinstance(value, str) and value in DEPTHS:
                        yield node.lineno, f'"{value}"'
            case _:
                pass


def count_questions() -> dict[str, list[str]]:
    """Return what is asked, by room and place."""
    found: dict[str, list[str]] = {"control": [], "elsewhere": []}
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        if name.startswith(MADE_FOR_IT):
            continue
        room = "control" if name.startswith("control/") else "elsewhere"
        asked = find_questions(ast.parse(path.read_text()))
        found[room] += [f"{name}:{line} {what}" for line, what in asked]
    return found


def test_the_depth_is_asked_ever_less_outside_its_places() -> None:
    found = {room: len(places) for room, places in count_questions().items()}
    more = {room: count for room, count in found.items() if count > MOST[room]}
    assert more == {}, "ask the membership instead; where there are fewer, lower MOST"


if __name__ == "__main__":
    for room, places in count_questions().items():
        print(room, len(places))
        for file, count in Counter(place.partition(":")[0] for place in places).most_common():
            print(f"  {count:4} {file}")
