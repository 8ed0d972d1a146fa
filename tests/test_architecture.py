"""The import contracts of pyproject.toml hold: rooms import downwards, doors stay single."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_import_contracts_hold() -> None:
    tool = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run(
        [tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_room_is_in_the_contract_and_in_the_map() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(c for c in config["contracts"] if c["type"] == "layers")["layers"]
    named = {room.strip() for layer in layers for room in layer.split("|")}
    rooms = {
        path.name
        for path in (ROOT / "src" / "perdure").iterdir()
        if path.is_dir() and path.name != "__pycache__"
    }
    assert rooms == named
    text = (ROOT / "ARCHITECTURE.md").read_text()
    drawn = re.findall(r"^    (\w+) {2,}\w", text.partition("## The rooms")[2], re.MULTILINE)
    assert sorted(drawn) == sorted(rooms)
