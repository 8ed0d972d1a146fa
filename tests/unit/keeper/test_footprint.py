"""What an import leaves in an image, for the packages that have to stay out of it."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.torch

PROGRAM = """
import sys
import torch, numpy, string
from perdure.keeper.footprint import Footprint, PatchWatch
sys.path.insert(0, sys.argv[1])
patches, footprint = PatchWatch(), Footprint()
import mine
print(patches.find_change("mine"), footprint.find_change(), sep="|")
print(patches.find_change("other"))
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import string\ndef capwords(s): return s\nstring.capwords = capwords",
         "changes string.capwords|"),
        ("import string\nstring.digits = '01'", "changes string.digits|"),
        ("import string\nclass T(string.Template): pass\nstring.Template = T",
         "changes string.Template|"),
        ("import string\nstring.Formatter.__init__ = lambda self: None",
         "changes string.Formatter.__init__|"),
        ("import string\nstring.more = string.Formatter.more = 1\nstring._cache = {}", "|"),
        ("import torch\ntorch.set_float32_matmul_precision('high')",
         "|changes a default of torch"),
        ("class Kind(type):\n    __module__ = property(lambda self: 3)\nclass A(metaclass=Kind):\n"
         "    pass\nkept = A()", "|"),
        ("import wave", "|"),
    ],
)  # fmt: skip
def test_a_package_that_changes_another_is_named(tmp_path: Path, text: str, said: str) -> None:
    """A value that is new changes nothing that others have."""
    (tmp_path / "mine.py").write_text(text)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [said, ""]
