"""Small scripts that find out what a rank is given. Each fills `seen`; see `test_same.py`.

`FILES` has what lies beside a script.
"""

BEGIN = """
import sys, os, time, _warnings, _signal
seen = {
    "began_s": time.time(),
    "modules": sorted(n for n in sys.modules if n.partition(".")[0] != "perdure"),
    "finders": [
        name for f in sys.meta_path
        if (name := getattr(f, "__name__", type(f).__name__))
        not in ("ModuleStore", "_After", "_While")
    ],
    "filters": [repr(one) for one in _warnings.filters],
    "path": sys.path[:],
    "flags": list(sys.flags),
    "orig_argv": [os.fsencode(word).hex() for word in sys.orig_argv],
    "argv": [os.fsencode(word).hex() for word in sys.argv],
    "odd": os.environb.get(b"ODD", b"").hex(),
    "cwd": os.getcwd(),
    "umask": os.umask(0o22),
    "signals": [str(_signal.getsignal(n)) for n in range(1, 32) if n not in (9, 19)],
    "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__],
    "main": sorted(set(globals()) - {"seen", "name", "f"}),
    "limits": [sys.getrecursionlimit(), sys.getswitchinterval()],
}
"""
END = """
import json, os, time
seen["pid"] = os.getpid()
with open(os.environ["REPORT"] + ".new", "w") as file:
    json.dump(seen, file, default=repr)
os.rename(file.name, os.environ["REPORT"])
time.sleep(3600)
"""

WHERE = """
def where(*names):
    root = os.path.dirname(os.path.abspath(__file__))
    found = [getattr(sys.modules.get(name), "__file__", None) for name in names]
    return [os.path.relpath(f, root) if f and f.startswith(root) else f for f in found]
"""

SHORT = {
    "first_line": "",
    "torch": "import torch\n"
    "seen['more'] = sorted(m for m in sys.modules if not m[:7] == 'perdure')\n"
    "seen['filters'] = [repr(one) for one in _warnings.filters]\n"
    "seen['threads'] = torch.get_num_threads()\n"
    "loaders = [getattr(m, '__loader__', None) for m in list(sys.modules.values())]\n"
    "specs = [getattr(m, '__spec__', None) for m in list(sys.modules.values())]\n"
    "loaders += [spec.loader for spec in specs if spec]\n"
    "seen['loaders'] = sorted({type(loader).__name__ for loader in loaders})",
    "own_module": "import tqdm\nseen['is'] = where('tqdm')",
    "variables": "os.environ |= {'OMP_NUM_THREADS': '2', 'HF_HOME': '/here', 'TQDM_NCOLS': '7'}\n"
    "import torch, tqdm\nseen['threads'] = torch.get_num_threads()\n"
    "import huggingface_hub.constants as hub\nseen['home'] = hub.HF_HOME",
    "finder": "asked = []\nclass Finder:\n    def find_spec(self, name, path=None, target=None):\n"
    "        asked.append(name)\nsys.meta_path.insert(0, Finder())\nimport requests\n"
    "sys.meta_path.pop(0)\nseen['more'] = sorted(set(asked) & set(sys.modules))",
}
"""Scripts that every run of the tests tries."""

LONG = {
    "vendored": "sys.path.insert(0, os.path.abspath('third_party'))\nimport requests\n"
    "seen['is'] = where('urllib3', 'requests', 'idna')",
    "before_torch": "import tracer, torch\nseen['traced'] = tracer.FIRST",
    "data_folder": "import numpy\nseen['is'] = where('numpy')",
    "again": "import importlib, importlib.util, json\n"
    "seen['spec'] = importlib.util.find_spec('colorsys').origin, 'colorsys' in sys.modules\n"
    "first = json\njson.mark = 1\nimportlib.reload(json)\nseen['kept'] = hasattr(json, 'mark')\n"
    "del sys.modules['json']\nimport json\nseen['other'] = json is first",
    "hides_numpy_s": "import numpy\nseen['is'] = where('numpy', 'numbers')",
    "read_in_c": "os.environ |= {'TORCH_ALLOW_TF32_CUBLAS_OVERRIDE': '1',"
    " 'TORCH_LINALG_PREFER_CUSOLVER': '1'}\nimport torch\n"
    "seen['is'] = torch.get_float32_matmul_precision(),"
    " str(torch.backends.cuda.preferred_linalg_library())",
    "cython": "import requests, numpy.random, torch\nfirst = torch\nimport torch._dynamo\n"
    "seen['is'] = where('numpy.random', 'torch._dynamo'), torch is first",
    "environment": "mine = 'PERDURE', 'TORCHINDUCTOR_CACHE', 'TRITON_CACHE', 'CUDA_CACHE',"
    " 'GLOO_SOCKET', 'TORCH_NCCL', 'TORCHELASTIC_SIGNALS'\n"
    "seen['is'] = sorted(n for n in os.environ if not n.startswith(mine))",
    "appended": "sys.path.append(os.path.abspath('third_party'))\nimport idna\n"
    "seen['is'] = where('idna')",
    "removed": "sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
    "try:\n    import numpy\nexcept ImportError as error:\n    seen['error'] = str(error)",
    "numpy": "import numpy\nseen['filters'] = [repr(one) for one in _warnings.filters]",
    "random": "import random\nrandom.seed(3)\nseen['draw'] = random.random()",
    "numpy_random": "import numpy\nnumpy.random.seed(3)\nseen['draw'] = numpy.random.rand()",
    "torch_random": "import torch\ntorch.manual_seed(3)\nseen['draw'] = torch.rand(3).tolist()",
    "torch_defaults": "import torch\nseen['is'] = [str(torch.get_default_dtype()),"
    " torch.are_deterministic_algorithms_enabled(), torch.get_num_interop_threads() > 0,"
    " torch.is_grad_enabled(), torch.get_float32_matmul_precision()]",
    "distributed": "import torch.distributed as dist\nseen['is'] = dist.is_initialized()",
    "tempfile": "os.environ['TMPDIR'] = os.getcwd()\nimport tempfile\n"
    "seen['is'] = tempfile.tempdir, tempfile.gettempdir() == os.getcwd()",
    "logging": "import logging\nroot = logging.getLogger()\n"
    "seen['is'] = root.level, [repr(h) for h in root.handlers], logging.raiseExceptions",
    "log_config": "import logging.config, requests\nlogging.config.dictConfig({'version': 1})\n"
    "import torch, torch.distributed\nknown = logging.root.manager.loggerDict\n"
    "names = [n for n in known if n in sys.modules and n[:7] in ('torch.d', 'urllib3')]\n"
    "seen['is'] = sorted(n for n in names if logging.getLogger(n).disabled)",
    "loggers": "import logging\nseen['is'] = logging.getLogger('own').getEffectiveLevel()",
    "multiprocessing": "import multiprocessing as mp\n"
    "seen['is'] = mp.get_start_method(), mp.current_process().name, mp.parent_process()\n"
    "seen['name'] = sys.modules['__mp_main__'] is sys.modules['__main__']",
    "threading": "import threading\nseen['is'] = [t.name for t in threading.enumerate()"
    " if not t.name.startswith('perdure')], threading.current_thread().name",
    "signal": "import signal\nseen['is'] = [str(signal.getsignal(n)) for n in range(1, 32)]",
    "limits": "import resource\nseen['is'] = [resource.getrlimit(n) for n in range(10)]",
    "streams": "seen['is'] = [(s.encoding, s.errors, s.isatty(), s.name, s.mode)"
    " for s in (sys.stdout, sys.stderr)]",
    "stdin": "seen['is'] = sys.stdin.read(), sys.stdin.encoding",
    "locale": "import locale\nseen['is'] = locale.getlocale(), locale.getpreferredencoding()",
    "decimal": "import decimal\nseen['is'] = repr(decimal.getcontext())",
    "gc": "import gc\nseen['is'] = gc.isenabled(), gc.get_threshold(), gc.get_debug()",
    "asyncio": "import asyncio\nseen['is'] = asyncio.run(asyncio.sleep(0, 5)),"
    " type(asyncio.get_event_loop_policy()).__name__",
    "ssl": "import ssl\nseen['is'] = ssl.OPENSSL_VERSION, ssl.get_default_verify_paths()",
    "pickle": "import pickle\nclass A: pass\n"
    "seen['is'] = type(pickle.loads(pickle.dumps(A()))) is A",
    "source": "import inspect\ndef f(): return 1\nseen['is'] = inspect.getsource(f)",
    "traceback": "import traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n"
    "    seen['is'] = traceback.format_exc()",
    "main_module": "import __main__\nseen['is'] = __main__.__name__, __main__.__spec__,"
    " __main__.__package__, __main__ is sys.modules['__main__'], type(__loader__).__name__",
    "metadata": "import importlib.metadata as m\n"
    "seen['is'] = m.version('torch'), m.version('numpy')",
    "iter_modules": "import pkgutil\n"
    "seen['is'] = sorted(m.name for m in pkgutil.iter_modules())[:200]",
    "site": "import site\nseen['is'] = site.ENABLE_USER_SITE, site.PREFIXES",
    "sysconfig": "import sysconfig\nseen['is'] = sysconfig.get_paths()",
    "hash": "seen['is'] = hash('x'), list({'a', 'b', 'c', 'd'})",
    "contextvars": "import contextvars\nseen['is'] = len(contextvars.copy_context())",
    "dataclass": "import dataclasses, typing\n@dataclasses.dataclass\nclass A:\n    x: int = 1\n"
    "seen['is'] = repr(A()), str(typing.get_type_hints(A))",
    "sqlite": "import sqlite3\nseen['is'] = sqlite3.sqlite_version",
    "ctypes": "import ctypes\nseen['is'] = ctypes.CDLL(None).getppid() > 0, ctypes.get_errno()",
    "futures": "import concurrent.futures as c\nwith c.ThreadPoolExecutor(2) as p:\n"
    "    seen['is'] = list(p.map(str, range(3)))",
    "child": "import subprocess\ncode = 'import sys, os; print(sorted(sys.modules))'\n"
    "done = subprocess.run([sys.executable, '-c', code], capture_output=True)\n"
    "seen['is'] = done.stdout.decode()",
    "shell": "import subprocess\nseen['is'] = subprocess.getoutput('umask; ulimit -a; pwd')",
    "forked": "r, w = os.pipe()\nif os.fork() == 0:\n    import json\n"
    "    os.write(w, json.dumps(len(sys.argv)).encode()); os._exit(0)\nos.wait()\n"
    "seen['is'] = os.read(r, 99).decode()",
    "spawned": "import multiprocessing as mp\nif __name__ == '__main__':\n"
    "    p = mp.get_context('spawn').Process(target=print)\n    p.start(); p.join()\n"
    "    seen['is'] = p.exitcode\nelse:\n    sys.exit()",
    "warning": "import warnings\nwith warnings.catch_warnings(record=True) as caught:\n"
    "    warnings.warn('x', DeprecationWarning)\nseen['is'] = [str(w.message) for w in caught]",
    "readline_free": "seen['more'] = [m in sys.modules for m in ('readline', 'threading', 'json')]",
    "requests": "import requests\n"
    "seen['more'] = sorted(m for m in sys.modules if m[:7] != 'perdure')",
    "jinja": "import jinja2\nseen['more'] = sorted(m for m in sys.modules if m[:7] != 'perdure')",
    "sympy": "import sympy\nseen['filters'] = [repr(one) for one in _warnings.filters]",
    "unittest": "import unittest.mock\nseen['is'] = where('unittest')",
    "xml": "import xml.dom.minidom as d\nseen['is'] = d.parseString('<a/>').toxml()",
    "email": "import email.message\n"
    "seen['more'] = sorted(m for m in sys.modules if m[:5] == 'email')",
    "debug_level": "os.environ['TORCH_DISTRIBUTED_DEBUG'] = 'DETAIL'\n"
    "import torch.distributed as dist\nseen['is'] = str(dist.get_debug_level())",
    "cpus": "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    "os.environ.pop('OMP_NUM_THREADS', None)\nimport torch\n"
    "seen['is'] = torch.get_num_threads()",
    "many_threads": "os.environ['OMP_NUM_THREADS'] = '999'\nimport torch\n"
    "seen['is'] = torch.get_num_threads()",
    "process": "import threading, subprocess\nmain = threading.main_thread()\n"
    "seen['thread'] = main.native_id == os.getpid(), main.ident == threading.get_ident()\n"
    "status = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
    "names = 'SigBlk', 'Umask', 'NoNewPrivs', 'Seccomp', 'CapEff', 'Cpus_allowed'\n"
    "seen['status'] = [status[name].strip() for name in names]\n"
    "seen['ignored'] = int(status['SigIgn'], 16) & ~0xa00  # SIGUSR1, SIGUSR2\n"
    "seen['place'] = os.nice(0), os.getpgrp() == os.getsid(0) == os.getpid()\n"
    "seen['oom'] = open('/proc/self/oom_score_adj').read()\n"
    "shell = 'ls /proc/self/fd | wc -w; grep SigBlk /proc/self/status'\n"
    "done = subprocess.run(shell, shell=True, close_fds=False, capture_output=True)\n"
    "seen['child'] = done.stdout.decode()",
    "interpreter": "import faulthandler, threading, tracemalloc\n"
    "seen['is'] = [sys.getdlopenflags(), repr(sys.get_asyncgen_hooks()), sys.gettrace(),"
    " sys.getprofile(), sys.breakpointhook is sys.__breakpointhook__,"
    " sys.unraisablehook is sys.__unraisablehook__,"
    " threading.excepthook is threading.__excepthook__, sys.get_int_max_str_digits(),"
    " sys.warnoptions, sys._xoptions, len(sys.path_hooks), sys.dont_write_bytecode,"
    " sys.pycache_prefix, faulthandler.is_enabled(), tracemalloc.is_tracing(), sys.exc_info(),"
    " sys.executable, sys._base_executable, sys.prefix, sys.getfilesystemencodeerrors()]\n"
    "seen['streams'] = [(s.name, s.mode, s.encoding, s.errors, s.newlines, s.line_buffering,"
    " s.write_through, s.closed) for s in (sys.stdin, sys.stdout, sys.stderr)]\n"
    "seen['own'] = sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__\n"
    "import time\nos.environ['TZ'] = 'Asia/Tokyo'\ntime.tzset()\nseen['zone'] = time.tzname\n"
    "import ctypes\nget = ctypes.CDLL(None).getenv\nget.restype = ctypes.c_char_p\n"
    "seen['getenv'] = [str(get(n)) for n in (b'RANK', b'LOCAL_RANK', b'HF_HOME', b'TZ')]\n"
    "def three():\n    '''\n    >>> three()\n    3\n    '''\n    return 3\n"
    "import doctest\nseen['doctest'] = list(doctest.testmod())\n"
    "number: int = 1\nseen['annotations'] = str(__annotations__)\n"
    "import spread.part\nseen['part'] = where('spread.part'), len(sys.modules['spread'].__path__)\n"
    "raw = sys.stdout.detach()\nimport io\nsys.stdout = io.TextIOWrapper(raw)\nprint('x')\n"
    "sys.stdout = os.fdopen(1, 'w', 1)\nprint('y')",
    "torch_state": "import torch, pickle, inspect\n"
    "import torch.distributed as dist, torch.multiprocessing as mp\n"
    "torch.set_num_interop_threads(3)\nmp.set_start_method('spawn')\n"
    "seen['set'] = torch.get_num_interop_threads(), mp.get_start_method()\n"
    "parts = dist.all_reduce, dist.init_process_group, torch.optim.SGD.step, dist.barrier\n"
    "seen['where'] = [(f.__module__, f.__qualname__, str(inspect.signature(f)),"
    " inspect.getsourcefile(f)) for f in parts]\n"
    "seen['pickle'] = [pickle.loads(pickle.dumps(f)) is f for f in parts]\n"
    "b = torch.backends\nseen['is'] = [b.cudnn.enabled, b.cudnn.benchmark, b.mkldnn.enabled,"
    " b.cpu.get_cpu_capability(), str(torch.get_default_device()), mp.get_sharing_strategy(),"
    " torch.is_inference_mode_enabled(), torch.is_autocast_enabled(), torch.cuda.is_available(),"
    " torch.cuda.is_initialized(), torch.autograd.is_multithreading_enabled()]\n"
    "seen['relu'] = torch.nn.functional.relu(torch.tensor([-1.0])).tolist()",
    "pool": "import multiprocessing as mp\nclass Part:\n    x = 3\n"
    "def take(part):\n    return part.x + (type(part) is Part)\n"
    "if __name__ == '__main__':\n    seen['is'] = []\n"
    "    for how in ('fork', 'spawn', 'forkserver'):\n"
    "        with mp.get_context(how).Pool(1) as pool:\n"
    "            seen['is'] += pool.map(take, [Part()])\n"
    "else:\n    import time\n    os.environ['REPORT'] += '.child'\n    time.sleep = lambda s: None",
    "dynamo": "import torch._dynamo\nseen['is'] = torch._dynamo.config.verbose",
    "loader": "import torch\nfrom torch.utils.data import DataLoader\n"
    "seen['is'] = [b.tolist() for b in DataLoader(range(4), num_workers=1)]",
}
"""More of them, for `make same`."""

FILES = {
    "own_module": {"tqdm.py": "MINE = 1"},
    "vendored": {"third_party/idna/__init__.py": "MINE = 1"},
    "before_torch": {"tracer.py": "import sys\nFIRST = 'torch' not in sys.modules"},
    "data_folder": {"numpy/data.txt": "", "torch/data.txt": ""},
    "hides_numpy_s": {
        "numbers.py": "from abc import ABC\nclass Number(ABC): pass\n"
        "class Complex(Number): pass\nclass Real(Complex): pass\n"
        "class Rational(Real): pass\nclass Integral(Rational): pass"
    },
    "appended": {"third_party/idna.py": "OTHER = 1"},
    "interpreter": {"spread/part.py": "MINE = 1"},
}
