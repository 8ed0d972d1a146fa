"""What an import leaves in an image, for the packages that have to stay out of it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.torch

PROGRAM = """
import os, sys
import torch, numpy, string
from perdure.keeper.footprint import Footprint, PatchWatch
for folder in sys.argv[1:]:
    child = os.fork()
    if not child:
        sys.path.insert(0, folder)
        patches, footprint = PatchWatch(), Footprint()
        import mine
        found = patches.find_change("mine"), footprint.find_change(), patches.find_change("other")
        print(found, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
PACKAGES = {
    "function": (
        "import string\ndef capwords(s): return s\nstring.capwords = capwords",
        ("changes string.capwords", ""),
    ),
    "constant": ("import string\nstring.digits = '01'", ("changes string.digits", "")),
    "class": (
        "import string\nclass T(string.Template): pass\nstring.Template = T",
        ("changes string.Template", ""),
    ),
    "method": (
        "import string\nstring.Formatter.__init__ = lambda self: None",
        ("changes string.Formatter.__init__", ""),
    ),
    "more": (
        "import string\nstring.more = string.Formatter.more = 1\nstring._cache = {}",
        ("", ""),
    ),
    "default": (
        "import torch\ntorch.set_float32_matmul_precision('high')",
        ("", "changes a default of torch"),
    ),
    "seed": ("import torch\ntorch.manual_seed(5)", ("", "changes a default of torch")),
    "other seed": ("import numpy\nnumpy.random.seed(5)", ("", "draws random numbers")),
    "sharing": (
        "import torch.multiprocessing as mp\nmp.set_sharing_strategy('file_system')",
        ("", "changes a default of torch"),
    ),
    "printing": (
        "import numpy\nnumpy.set_printoptions(precision=2)",
        ("", "changes a default of numpy"),
    ),
    "finder": (
        "import sys\nclass F:\n    def find_spec(self, *args): pass\nsys.meta_path.insert(0, F())",
        ("", "changes the finders"),
    ),
    "path hook": ("import sys\nsys.path_hooks.append(print)", ("", "changes the finders")),
    "warnings": (
        "import logging\nlogging.captureWarnings(True)",
        ("", "changes a hook"),
    ),
    "collector": ("import gc\ngc.set_threshold(5)", ("", "changes a limit of Python")),
    "precision": (
        "import decimal\ndecimal.getcontext().prec = 50",
        ("", "changes a limit of Python"),
    ),
    "time-out": (
        "import socket\nsocket.setdefaulttimeout(5)",
        ("", "changes a limit of Python"),
    ),
    "odd": (
        "class Kind(type):\n    __module__ = property(lambda self: 3)\n"
        "class A(metaclass=Kind):\n    pass\nkept = A()",
        ("", ""),
    ),
    "nothing": ("import wave", ("", "")),
}


def test_a_package_that_changes_another_is_named(tmp_path: Path) -> None:
    """A value that is new changes nothing that others have. Each is imported in a fork."""
    for name, (text, _) in PACKAGES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(text)
    folders = [str(tmp_path / name) for name in PACKAGES]
    command = [sys.executable, "-c", PROGRAM, *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    found = map(ast.literal_eval, done.stdout.splitlines())
    assert dict(zip(PACKAGES, found, strict=True)) == {
        name: (*said, "") for name, (_, said) in PACKAGES.items()
    }
