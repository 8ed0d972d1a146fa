"""What an image has imported, and what a rank sees of it: each case in a Python of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import PATIENCE_S

BEGIN = """
import sys
sys.path.pop(0)
fresh = list(sys.modules)
import _warnings, os
environ = dict(os.environ)
filters = list(_warnings.filters)
from perdure.keeper.modules import ModuleLog, ModuleStore
log = ModuleLog()
log.note_first()
reasons = []
with log:
    import importlib
    for name in {names}:
        importlib.import_module(name)
store = ModuleStore(log)
stored = dict(sys.modules)
store.stow(frozenset(["numpy"]))
{meanwhile}
unequal = store.find_unequal({script!r})
os.environ.clear()
os.environ.update(environ)
store.hide(on_unequal=reasons.append)
first = [name for name in sys.modules if name.partition(".")[0] != "perdure"]
seen = {{"fresh": first == fresh, "filters": _warnings.filters == filters, "unequal": unequal}}
sys.path.insert(0, {script!r})
"""
END = """
import json, os
seen["reasons"] = reasons
os.write(1, json.dumps(seen).encode())
"""


def run(
    tmp_path: Path,
    names: tuple[str, ...],
    text: str,
    said: str = "",
    meanwhile: str = "",
    **environ: str,
) -> dict[str, Any]:
    """Return what a rank has `seen`, whose image has imported `names`.

    `meanwhile` runs between the image and the rank. At its end the rank writes `said` to its
    standard error.
    """
    script = tmp_path / "script"
    script.mkdir(exist_ok=True)
    program = BEGIN.format(names=names, script=str(script), meanwhile=meanwhile) + text + END
    env = os.environ | {"PYTHONPATH": str(tmp_path / "installed")} | environ
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=env,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr.decode()) == (0, said)
    seen: dict[str, Any] = json.loads(done.stdout)
    assert seen["fresh"]
    assert seen["filters"]
    return seen


def install(tmp_path: Path, **texts: str) -> None:
    """Write modules that are installed; `a__b` is the module `b` of the package `a`."""
    for name, text in texts.items():
        path = tmp_path / "installed" / f"{name.replace('__', '/', 1)}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_packages_without_init_are_hidden_and_handed_out(tmp_path: Path) -> None:
    """As `google`: its path is worked out from that of its visible parent."""
    part = tmp_path / "installed" / "vendor" / "cloud" / "part.py"
    part.parent.mkdir(parents=True)
    part.write_text("value = 3\n")
    more = tmp_path / "script" / "vendor" / "cloud" / "more.py"
    more.parent.mkdir(parents=True)
    more.write_text("value = 4\n")
    text = (
        "import vendor.cloud.part\nimport vendor.cloud.more\n"
        "seen['values'] = vendor.cloud.part.value, vendor.cloud.more.value\n"
    )
    seen = run(tmp_path, ("vendor.cloud.part",), text)
    assert seen["values"] == [3, 4]
    assert seen["reasons"] == []


@pytest.mark.parametrize("also", ["", os.pathsep + "{installed}"])
def test_the_script_s_folder_may_be_on_the_path_already(tmp_path: Path, also: str) -> None:
    """PYTHONPATH=. and PYTHONPATH=X: are usual. A module that another one made is on no path."""
    install(tmp_path, outer="import sys, types\nsys.modules['made'] = types.ModuleType('made')\n"
            "import importlib.util as u\nsys.modules['made'].__spec__ = "
            "u.spec_from_loader('made', None, origin='none')")  # fmt: skip
    path = f"{tmp_path / 'script'}{os.pathsep}{tmp_path / 'installed'}"
    path += also.format(installed=tmp_path / "installed")
    text = "import outer\nseen['same'] = outer is stored['outer'] and 'made' in sys.modules\n"
    seen = run(tmp_path, ("outer",), text, PYTHONPATH=path)
    assert (seen["unequal"], seen["reasons"], seen["same"]) == ("", [], True)


def test_a_module_comes_with_all_that_it_imports_in_order(tmp_path: Path) -> None:
    install(
        tmp_path,
        outer="import warnings, os, inner\nimport pack.part\n"
        "warnings.simplefilter('error', ResourceWarning)\nos.environ['OUTER'] = 'yes'",
        inner="import sys\nsys.modules['made'] = sys",
        pack____init__="",
        pack__part="from . import other",
        pack__other="",
    )
    text = """
import os
before = set(sys.modules)
seen["early"] = "OUTER" in os.environ
import outer
seen["same"] = outer is stored["outer"]
names = [name for name in sys.modules if name not in before]
seen["new"] = [n for n in names if n.partition(".")[0] in ("outer", "inner", "made", "pack")]
seen["filter"] = _warnings.filters[0][:3:2] == ("error", ResourceWarning)
seen["late"] = os.environ["OUTER"]
"""
    seen = run(tmp_path, ("pack.other", "inner", "outer"), text)
    assert seen["new"] == ["made", "inner", "pack", "pack.other", "pack.part", "outer"]
    assert (seen["early"], seen["same"], seen["filter"], seen["late"]) == (False, True, True, "yes")


@pytest.mark.parametrize("place", ["script", "vendored"])
def test_a_module_of_the_script_is_found_and_denies_its_importers(
    tmp_path: Path, place: str
) -> None:
    install(tmp_path, outer="import inner\nWHICH = inner.WHICH", inner="WHICH = 'installed'")
    own = tmp_path / place
    own.mkdir()
    (own / "inner.py").write_text("WHICH = 'own'")
    text = f"sys.path.insert(0, {str(own)!r})\nimport outer, inner\n"
    text += "seen['is'] = outer.WHICH, inner.WHICH"
    assert run(tmp_path, ("outer",), text)["is"] == ["own", "own"]


def test_a_folder_of_data_hides_no_module(tmp_path: Path) -> None:
    install(tmp_path, outer="import inner", inner="")
    (tmp_path / "script" / "inner").mkdir(parents=True)
    text = "import outer, inner\nseen['same'] = inner is stored['inner'] is outer.inner"
    assert run(tmp_path, ("outer",), text)["same"]


def test_variables_that_the_script_sets_count(tmp_path: Path) -> None:
    install(
        tmp_path,
        outer="import inner\nWHERE = inner.WHERE",
        inner="import os\nWHERE = os.environ.get('WHERE', 'nowhere')",
        apart="",
    )
    text = """
import os
os.environ["WHERE"] = "here"
import outer, apart
seen["is"] = outer.WHERE, apart is stored["apart"]
"""
    assert run(tmp_path, ("outer", "apart"), text)["is"] == ["here", True]


def test_a_second_import_and_a_reload_are_the_script_s(tmp_path: Path) -> None:
    install(tmp_path, outer="VALUE = []")
    text = """
import importlib, importlib.util
seen["found"] = importlib.util.find_spec("outer").origin, "outer" in sys.modules
import outer
outer.VALUE.append(1)
seen["reloaded"] = importlib.reload(outer).VALUE
del sys.modules["outer"]
import outer as second
seen["other"] = second is not outer
"""
    seen = run(tmp_path, ("outer",), text)
    assert seen["found"] == [str(tmp_path / "installed" / "outer.py"), False]
    assert (seen["reloaded"], seen["other"]) == ([], True)


FRESH = """
import sys, os, _warnings
sys.path[0] = {script!r}
seen = {{}}
"""
SETTING = """
import os, warnings
os.environ['FORCED'] = '1'
os.environ['MANY'] += ':b'
LEVEL = os.environ.setdefault('LEVEL', 'info')
warnings.simplefilter('ignore', DeprecationWarning)
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    import inner
"""
OPTIONAL = """
import importlib.util
try:
    import extra
except ImportError:
    extra = None
FOUND = importlib.util.find_spec('more') is not None, importlib.util.find_spec('data') is not None
"""
MARKING = """
from importlib.machinery import FileFinder, PathFinder, SourceFileLoader
class Marking(SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        module.mark = 1
"""
LOOK = (
    "import outer\nseen['is'] = outer.inner is sys.modules['inner'], hasattr(outer.inner, 'mark')"
)
SHAPES = {
    "found by now": (
        {"outer": OPTIONAL},
        {"extra.py": "", "more/__init__.py": "", "data/own.txt": ""},
        "import outer\nseen['is'] = bool(outer.extra), outer.FOUND[0]",
    ),
    "put there by now": (
        {"outer": OPTIONAL},
        {},
        "sys.modules['extra'] = os\nimport outer\nseen['is'] = bool(outer.extra)",
    ),
    "a variable that an import sets": (
        {"outer": "import os\nos.environ['FORCED'] = '1'"},
        {},
        "os.environ['FORCED'] = '0'\nimport outer\nseen['is'] = os.environ['FORCED']",
    ),
    "a variable that an import sets where it is missing": (
        {"outer": SETTING, "inner": ""},
        {},
        "os.environ['LEVEL'] = 'debug'\nimport outer\nseen['is'] = outer.LEVEL",
    ),
    "a variable that an import changes": (
        {"outer": SETTING, "inner": ""},
        {},
        "import outer\nseen['is'] = os.environ['MANY'], os.environ['LEVEL'], outer.LEVEL",
    ),
    "filters": (
        {"outer": SETTING, "inner": ""},
        {},
        "import outer\nseen['is'] = [str(one) for one in _warnings.filters]",
    ),
    "a finder that refuses": (
        {"outer": "try:\n    import inner\nexcept ImportError:\n    inner = None", "inner": ""},
        {},
        "class Finder:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'inner':\n            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Finder())\nimport outer\nseen['is'] = bool(outer.inner)",
    ),
    "a finder that finds": (
        {"outer": "import inner", "inner": ""},
        {},
        MARKING + "class Finder:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'inner':\n            spec = PathFinder.find_spec(name, path)\n"
        "            spec.loader = Marking(name, spec.origin)\n            return spec\n"
        f"sys.meta_path.insert(0, Finder())\n{LOOK}",
    ),
    "a finder that asks all others": (
        {"outer": "import inner", "inner": ""},
        {},
        "class Finder:\n    def find_spec(self, name, path=None, target=None):\n"
        "        found = [one.find_spec(name, path) for one in sys.meta_path if one is not self]\n"
        "        return next(filter(None, found), None)\n"
        f"sys.meta_path.insert(0, Finder())\n{LOOK}",
    ),
    "what finders are asked for": (
        {"outer": "import inner\ntry:\n    import extra.part\nexcept ImportError: pass\n"
         "import importlib.util\nimportlib.util.find_spec('apart')",
         "inner": ""},
        {},
        "asked = []\nclass Finder:\n    def find_spec(self, name, path=None, target=None):\n"
        "        asked.append(name)\nsys.meta_path.insert(0, Finder())\nimport outer\n"
        "sys.meta_path.pop(0)\nseen['is'] = asked",
    ),
    "loggers": (
        {"outer": "import logging, inner\nlog = logging.getLogger(__name__)\n"
         "more = logging.getLogger('more')\nfrom inner import log as other",
         "inner": "import logging\nlog = logging.getLogger(__name__)"},
        {},
        "import inner, logging.config\nlogging.config.dictConfig({'version': 1})\nimport outer\n"
        "seen['is'] = [log.disabled for log in (outer.log, outer.more, outer.other)]",
    ),
    "path hooks": (
        {"outer": "import inner", "inner": ""},
        {},
        MARKING + "sys.path_hooks.insert(0, FileFinder.path_hook((Marking, ['.py'])))\n"
        f"sys.path_importer_cache.clear()\n{LOOK}",
    ),
    "an import function": (
        {"outer": "try:\n    import inner\nexcept ImportError:\n    inner = None", "inner": ""},
        {},
        "import builtins\nfirst = builtins.__import__\ndef refuse(name, *more):\n"
        "    if name == 'inner':\n        raise ImportError(name)\n    return first(name, *more)\n"
        "builtins.__import__ = refuse\nimport outer\nseen['is'] = bool(outer.inner)",
    ),
}  # fmt: skip
"""What is installed, what lies beside the script, and the script."""


@pytest.mark.parametrize("shape", SHAPES)
def test_a_script_that_changes_imports_finds_what_a_fresh_python_finds(
    tmp_path: Path, shape: str
) -> None:
    installed, own, text = SHAPES[shape]
    install(tmp_path, **installed)
    for name, content in own.items():
        path = tmp_path / "script" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    path = str(tmp_path / "installed")
    program = FRESH.format(script=str(tmp_path / "script")) + text + END.replace("reasons", "None")
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path, "MANY": "x"},
        capture_output=True,
        timeout=PATIENCE_S,
        check=True,
    )
    fresh = json.loads(done.stdout)["is"]
    assert run(tmp_path, ("outer",), text, MANY="x")["is"] == fresh


def test_variables_that_one_import_sets_and_another_reads_change_nothing(tmp_path: Path) -> None:
    """The second one is the image's, although the rank does not have what it has read."""
    install(
        tmp_path,
        outer="import os\nos.environ['MANY'] += ':b'\nimport inner",
        inner="import os\nSEEN = os.environ['MANY']\nos.environ['OWN'] = SEEN\nos.environ['OWN']",
    )
    text = "import outer, inner\nseen['is'] = inner.SEEN, os.environ['MANY'], os.environ['OWN']\n"
    text += "seen['same'] = outer is stored['outer'] and inner is stored['inner']\n"
    seen = run(tmp_path, ("outer",), text, MANY="a")
    assert (seen["is"], seen["same"]) == (["a:b"] * 3, True)


def test_another_thread_waits_for_an_import_to_end(tmp_path: Path) -> None:
    """It would find a package without its parts."""
    install(tmp_path, pack____init__="from . import part\nimport inner", pack__part="", inner="")
    text = """
import threading
def look():
    import pack
    seen["parts"] = "inner" in sys.modules
thread = threading.Thread(target=look)
class Finder:
    def concerns(self, name):
        return name == "inner"
    def find_spec(self, name, path=None, target=None):
        if name == "inner":
            thread.start()
            thread.join(1.0)
sys.meta_path.insert(0, Finder())
import pack
thread.join()
"""
    assert run(tmp_path, ("pack",), text)["parts"]


def test_a_module_that_another_looks_for_is_not_imported(tmp_path: Path) -> None:
    """As torch._dynamo looks for networkx, which another import of the image has loaded."""
    install(
        tmp_path,
        outer="import importlib.util\nWHERE = importlib.util.find_spec('inner').origin",
        inner="",
    )
    text = "import outer\nseen['is'] = 'inner' in sys.modules, outer is stored['outer']"
    assert run(tmp_path, ("outer", "inner"), text)["is"] == [False, True]
    (tmp_path / "script" / "inner.py").write_text("")
    where = run(tmp_path, ("outer", "inner"), "import outer\nseen['is'] = outer.WHERE")["is"]
    assert where == str(tmp_path / "script" / "inner.py")


def test_finders_of_the_script_see_every_import(tmp_path: Path) -> None:
    install(tmp_path, outer="import inner", inner="")
    text = """
class Finder:
    def find_spec(self, name, path=None, target=None):
        seen.setdefault("asked", []).append(name)
sys.meta_path.insert(0, Finder())
import outer
sys.meta_path.pop(0)
"""
    assert run(tmp_path, ("outer",), text)["asked"] == ["outer", "inner"]


def test_compiled_packages_are_not_imported_twice(tmp_path: Path) -> None:
    """A script whose numpy would be another one cannot be served; the reason names the module."""
    own = tmp_path / "script"
    own.mkdir()
    (own / "numbers.py").write_text("")
    seen = run(tmp_path, ("numpy",), "import numpy\nseen['same'] = numpy is stored['numpy']")
    assert f"numbers is {own / 'numbers.py'}" in seen["unequal"]
    assert seen["reasons"]
    assert seen["same"]


def test_a_handler_at_exit_runs_only_if_the_rank_has_imported_its_module(tmp_path: Path) -> None:
    install(
        tmp_path,
        seen_one="import atexit, os\natexit.register(os.write, 2, b'seen')",
        unseen="import atexit, os\natexit.register(os.write, 2, b'unseen')",
        undone="import atexit\ndef undo(): raise SystemExit(9)\natexit.register(undo)",
    )
    text = "import seen_one, undone, atexit\natexit.unregister(undone.undo)\n"
    text += "atexit.register(print, file=open('/dev/null', 'w'))\n"
    run(tmp_path, ("seen_one", "unseen", "undone"), text, said="seen")


def test_a_package_that_was_installed_anew_is_imported_anew(tmp_path: Path) -> None:
    install(tmp_path, user="import used.part", used____init__="", used__part="V = 1", other="V = 1")
    new = tmp_path / "new.py"
    new.write_text("V = 22")
    place = tmp_path / "installed" / "used" / "part.py"
    text = "import user, other, used.part\n"
    text += "seen['is'] = used.part.V, other is stored['other'], user is stored['user']\n"
    meanwhile = f"import os; os.replace({str(new)!r}, {str(place)!r})"
    assert run(tmp_path, ("user", "other"), text, meanwhile=meanwhile)["is"] == [22, True, False]


def test_another_name_of_a_compiled_module_makes_no_package_compiled(tmp_path: Path) -> None:
    """As `requests.packages` names the modules of charset_normalizer."""
    install(
        tmp_path,
        aliases____init__="import sys, used, numpy._core._multiarray_umath as fast\n"
        "sys.modules['aliases.fast'] = fast",
        used="V = 1",
    )
    script = tmp_path / "script"
    script.mkdir()
    (script / "used.py").write_text("V = 2")
    text = "import aliases\nseen['is'] = aliases.used.V\n"
    seen = run(tmp_path, ("aliases",), text)
    assert (seen["is"], seen["reasons"]) == (2, [])


def test_a_module_of_cython_s_own_is_no_other_package(tmp_path: Path) -> None:
    """A package that the image does not have, as the script's own, makes it before numpy."""
    text = "import types\nsys.modules['cython_runtime'] = types.ModuleType('cython_runtime')\n"
    text += "import numpy.random\nseen['same'] = numpy.random is stored['numpy.random']\n"
    seen = run(tmp_path, ("numpy.random",), text)
    assert (seen["reasons"], seen["same"]) == ([], True)


@pytest.mark.parametrize(
    ("setting", "read"),
    [
        ("NPY_ENABLE_CPU_FEATURES=AVX2", True),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1", True),
        ("PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync", True),
        ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", False),
    ],
)
def test_variables_that_compiled_modules_read_when_they_are_loaded_count(
    tmp_path: Path, setting: str, read: bool
) -> None:
    name, _, value = setting.partition("=")
    seen = run(tmp_path, ("numpy",), f"os.environ[{name!r}] = {value!r}\nimport numpy\n")
    assert seen["reasons"] == ([f"numpy: it reads {name}"] if read else [])
