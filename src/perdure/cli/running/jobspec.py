"""A job file and the options of `perdure run` become one JobSpec; options win.

It is checked before anything is started, so that a mistake costs no start-up. Nothing of the user's
is imported or executed here; a file is only compiled.
"""

import os
import re
import shutil
import struct
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import MAGIC_NUMBER, find_spec
from pathlib import Path
from typing import Any

import msgspec

from perdure.adapters.health import read_installed
from perdure.cli.running.options import RunOptions
from perdure.cli.running.torchrun import (
    LOOPBACK,
    count_cpus,
    list_rdzv_notes,
    list_visible_gpus,
    parse_nproc,
    read_rendezvous,
)
from perdure.files.owner import read_owner, refuse_owner
from perdure.files.regular import UnfitFileError, read_file
from perdure.launch.catalog import find_line
from perdure.launch.environment import explain_default_threads
from perdure.model import job
from perdure.model.codec import decode, make_encodable
from perdure.model.errors import ConfigError, PlatformError, ProtocolError
from perdure.model.input.raw import carry_text, restore_job
from perdure.model.input.source import BOM, find_misfit, parse_toml
from perdure.model.job import JobSpec
from perdure.model.platforms.box import TESTED_TORCHES, TORCH_END, TORCH_MIN, read_version
from perdure.service.jobfolders import is_alive, paths_of

_PATHS = {
    "nats": ("creds", "tls_cert", "tls_key", "tls_ca"),
    "notify": ("webhook_token_file",),
    "preemption": ("file",),
    "tracking": ("tensorboard",),
}
"""Fields that are nothing but a path."""

_FIELDS = {
    **dict.fromkeys(("script", "name", "nodes", "spares", "remote", "log_dir")),
    **dict.fromkeys(("module", "no_python", "cold", "observe")),
    "own": "checkpoint.own",
    "max_restarts": "restart.max_restarts",
    "shutdown_timeout": "restart.grace_s",
    "nats": "nats.url",
    "nats_creds": "nats.creds",
    "nats_tls_cert": "nats.tls_cert",
    "nats_tls_key": "nats.tls_key",
    "nats_tls_ca": "nats.tls_ca",
    "replicas": "torchft.replicas",
}
"""Option -> the job file's field that it sets as it is; None: of the same name."""


def read_job_file(path: str) -> dict[str, Any]:
    """Return a job file's document (TOML, or JSON where its name says so), not yet validated.

    Raises:
        ConfigError: it cannot be read, or is no TOML; the line is named.
    """
    try:
        data = read_file(path, follow=True)
        if path.endswith(".json"):
            return decode(data.removeprefix(BOM.encode()), dict[str, Any])
        return parse_toml(data, path)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", hint="is the path right, seen from here?"
        ) from error
    except ProtocolError as error:
        raise ConfigError(f"{path}: not JSON: {error}", hint="it has to be one object") from error


def make_spec(options: RunOptions) -> tuple[JobSpec, bool, list[str]]:
    """Return the job, whether the user named it, and notes to show. Paths become absolute.

    Raises:
        ConfigError: an option or a field is wrong; the message names its path.
    """
    document: dict[str, Any] = {"script": ""}
    if options.config:
        document |= read_job_file(options.config)
        _take_nproc(document, options)
        validate(document, options.config)  # So that options are written over what has its shape.
    _apply_options(document, options)
    met = read_rendezvous(options.map_rendezvous(), options.environ)
    if met is not None:
        document["nodes"] = met.nodes_min
        document["nodes_max"] = met.nodes_max if met.nodes_max > met.nodes_min else 0
    spec = restore_job(validate(document, "options"))
    if met is not None:
        for wrong, message, hint in _check_rendezvous(spec, options):
            if wrong:
                raise ConfigError(message, hint=hint)
        spec = msgspec.structs.replace(spec, remote=spec.num_nodes - 1)
    if not spec.script:
        if options.config:
            hint = f'script = "train.py" in it; perdure run -c {options.config} SCRIPT has one too'
            raise ConfigError(f"{options.config}: no script to run", hint=hint)
        raise ConfigError("no script to run", hint="perdure run [OPTIONS] SCRIPT [ARGS...]")
    if spec.module and spec.no_python:
        raise ConfigError("--module and --no-python exclude one another", hint="choose one")
    spec = lay_out(spec)
    return locate_all(spec), "name" in document, _list_option_notes(options, spec)


def locate_all(spec: JobSpec) -> JobSpec:
    """Return the job with absolute paths: what is relative is so to where the script runs."""
    cwd = os.path.abspath(spec.cwd)
    places = {
        name: _locate(os.path.expandvars(getattr(spec.checkpoint, name)), cwd)
        for name in ("url", "from_")
    }
    told = {"webhook": spec.alerts.webhook, "apprise": spec.alerts.apprise}
    told |= {n: "@" + _locate(v[1:], cwd) for n, v in told.items() if v.startswith("@")}
    parts: dict[str, Any] = {
        "checkpoint": msgspec.structs.replace(spec.checkpoint, **places),
        "alerts": msgspec.structs.replace(spec.alerts, **told),
    }
    for section, names in _PATHS.items():
        part = getattr(spec, section)
        paths = {name: _locate(getattr(part, name), cwd) for name in names}
        parts[section] = msgspec.structs.replace(part, **paths)
    return msgspec.structs.replace(spec, cwd=cwd, log_dir=_locate(spec.log_dir, cwd), **parts)


_LOGIN = re.compile(r"://[^/]*@")

Faults = tuple[tuple[object, str, str], ...]
"""(whether it is so, what is wrong, a hint)."""


def lay_out(spec: JobSpec) -> JobSpec:
    """Return the job with a node for each replica group, if it has any.

    Raises:
        ConfigError: nodes, groups, replicas of the bus and --observe do not go together.
    """
    torchft, observed = spec.torchft, spec.observe
    groups, held = torchft.replicas, torchft.lighthouse == "perdure" and not observed
    placed = msgspec.structs.replace(spec, nodes=groups or spec.nodes)
    if groups and observed and torchft.lighthouse == "perdure":
        # Perdure's own holds and evicts; torchft's does what it would do without perdure.
        stock = msgspec.structs.replace(torchft, lighthouse="stock")
        placed = msgspec.structs.replace(placed, torchft=stock)
    own = "no --observe" if observed else 'torchft.lighthouse = "perdure"'
    of_groups = _check_groups(placed, groups, spec.nodes, "" if held else own) if groups else ()
    on_nodes = _check_nodes(placed, observed)
    for wrong, message, hint in (*of_groups, *on_nodes, *_check_tracking(placed.tracking)):
        if wrong:
            raise ConfigError(message, hint=hint)
    return placed


_LAST = "they are the last of the nodes: --nodes K --remote R with R up to K"


def _check_groups(spec: JobSpec, groups: int, nodes: int, own: str) -> Faults:
    """Return what replica groups of torchft, for which `nodes` were given, do not go with.

    `own` says how the lighthouse becomes perdure's, which holds groups; empty where it is.
    """
    place = spec.lighthouse.bind if spec.lighthouse is not None else "127.0.0.1"
    timed = next((n for n in ("every_steps", "every_s") if getattr(spec.checkpoint, n)), "")
    return (
        (
            nodes not in (1, groups),
            f"--nodes {nodes}: each of the {groups} replica groups is a node",
            "",
        ),
        (
            spec.served,
            "torchft.elsewhere: groups that others start are served by `perdure serve`",
            "perdure serve NAME, or leave it out",
        ),
        (
            place not in LOOPBACK[1:4],
            f"torchft.bind = {place}: the groups of perdure run are on this machine",
            "leave it out",
        ),
        (spec.no_python, "--torchft and --no-python exclude one another", ""),
        (
            not own and find_spec("grpc") is None,
            "--torchft needs grpcio",
            "pip install 'perdure[torchft]'",
        ),
        (
            spec.spares and own,
            "--spares: a spare group is held at perdure's own lighthouse only",
            f"{own}, or one replica more",
        ),
        (
            timed and own,
            f"checkpoint.{timed}: who has the state is known to perdure's own lighthouse only",
            f"{own}, or leave checkpoints to the script",
        ),
        (
            bool(spec.checkpoint.own),
            "checkpoint.own: nothing is moved while other replica groups may write",
            "leave it out",
        ),
        (spec.growth, "nodes_max: replica groups of torchft are `torchft.replicas`", ""),
        (spec.remote, "--remote: replica groups of torchft are all started here", _LAST),
    )


def _check_rendezvous(spec: JobSpec, options: RunOptions) -> Faults:
    """Return what does not go with a command that is typed on every node."""
    here = "the first node starts all of them, and the others join it"
    return (
        (
            options.nodes is not None or options.remote is not None,
            "--nnodes says how many nodes there are; --nodes and --remote go without it",
            "--nnodes N alone",
        ),
        (options.placement, "--placement and --nnodes exclude one another", ""),
        (
            options.detach,
            "--detach: on each node the command stays there as long as the node trains",
            "nohup perdure run ... &, or `perdure launch`",
        ),
        (spec.groups, "--nnodes: replica groups of torchft are all on one machine", ""),
        (
            spec.nats.url or spec.nats.tls_cert,
            f"nats: with --nnodes the server and its certificate are perdure's own; {here}",
            "leave it out, or perdure node invite and perdure node join",
        ),
    )


def _check_nodes(spec: JobSpec, observed: bool) -> Faults:
    """Return what the nodes do not go with.

    Machines that join are an action, so that a world that is only observed does not grow.
    """
    return (
        (
            observed and spec.growth,
            f"nodes_max = {spec.nodes_max}: a world that is only observed never grows",
            "leave nodes_max or --observe out",
        ),
        (
            spec.remote > spec.num_nodes,
            f"--remote {spec.remote}: the job has {spec.num_nodes} nodes",
            _LAST,
        ),
        (
            spec.remote < spec.growth or (spec.spares % spec.nproc and spec.growth),
            f"nodes_max = {spec.nodes_max}: {spec.growth} nodes are to come from elsewhere, and "
            "spares are whole nodes",
            f"--remote {max(spec.remote, spec.growth)}, spares a multiple of {spec.nproc}",
        ),
    )


def _check_tracking(tracking: job.TrackingConfig) -> Faults:
    """Return what trackers do not go with: a job file is kept, and shown to who looks."""
    return (
        (
            _LOGIN.search(tracking.mlflow),
            "tracking.mlflow has a login in it, which would be kept with the job",
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
        ),
        (
            tracking.wandb.count("/") > 1 or "://" in tracking.wandb,
            f"tracking.wandb = {tracking.wandb}: not PROJECT or ENTITY/PROJECT",
            "where a server of your own is, says WANDB_BASE_URL",
        ),
        (
            "://" in tracking.tensorboard,
            f"tracking.tensorboard = {tracking.tensorboard}: not a folder",
            "a folder that this machine sees",
        ),
    )


def _locate(path: str, cwd: str) -> str:
    if not path or "://" in path or path.startswith("$"):
        return path
    return os.path.join(cwd, os.path.expanduser(path))


def _take_nproc(document: dict[str, Any], options: RunOptions) -> None:
    """Have a document's `nproc` be a number, as on the command line, which wins."""
    if options.nproc is not None:
        document.pop("nproc", None)
    elif isinstance(document.get("nproc"), str):
        try:
            document["nproc"] = parse_nproc(document["nproc"], options.environ)
        except ConfigError as error:
            path = options.config or ""
            line = find_line(Path(path).read_text(errors="replace"), ["nproc"])
            text = error.message.replace("-n ", "nproc: ", 1)
            raise ConfigError(f"{path}, line {line}: {text}", hint=error.hint) from None


def _apply_options(document: dict[str, Any], options: RunOptions) -> None:
    """Write what was given on the command line over the job file's document."""
    given = {
        field or option: value
        for option, field in _FIELDS.items()
        if (value := getattr(options, option)) is not None and value is not False
    }
    # `--nats "$NATS"` of a variable that is not set names no server; a name or script is given so.
    said = {field.rpartition(".")[0] for field, value in given.items() if value != ""}
    for field, value in given.items():
        section, _, name = field.rpartition(".")
        if not section:
            document[name] = value
        elif section in said:
            document.setdefault(section, {})[name] = value
    if options.nproc is not None:
        document["nproc"] = parse_nproc(options.nproc, options.environ)
    if options.args or options.script is not None:
        document["args"] = list(options.args or ())
    if options.torchft and not document.get("torchft", {}).get("replicas"):
        document["torchft"] = {**document.get("torchft", {}), "replicas": 2}
    named = {"ROLE_NAME": options.role, "TORCHELASTIC_RUN_ID": options.rdzv_id}
    if named["TORCHELASTIC_RUN_ID"] == "none":  # Which is torchrun's default.
        del named["TORCHELASTIC_RUN_ID"]
    variables = [*(options.env or ()), *(f"{k}={v}" for k, v in named.items() if v is not None)]
    if variables:
        pairs = [pair.partition("=") for pair in variables]
        bad = next((key + sep for key, sep, _ in pairs if not key or not sep), None)
        if bad is not None:
            raise ConfigError(f"--env {bad}: no `=`", hint="--env NAME=VALUE")
        document["env"] = {**document.get("env", {}), **{k: v for k, _, v in pairs}}


def validate(document: dict[str, Any], source: str) -> JobSpec:
    """Return the job of a document.

    Raises:
        ConfigError: a field is unknown or wrong; the message has its path, and its line where
            `source` is a TOML file that has it; the hint has near names.
    """
    hint = f"every field of a job file is documented in {job.__file__}"
    wrong = find_misfit(document, JobSpec, hint, "fields")
    if wrong is None:
        spec = msgspec.convert(document, JobSpec)
        _check_size(spec, document, source)
        return spec
    what, hint = wrong.what, wrong.hint
    if wrong.place == "name":
        what, hint = "not a name of a job", "letters, digits and _.-, at most 63, no - in front"
    at = f"{wrong.place}: " if wrong.place else ""
    raise ConfigError(f"{source}{_find_line(source, wrong.keys)}: {at}{what}", hint=hint)


def _check_size(spec: JobSpec, document: dict[str, Any], source: str) -> None:
    """Refuse a job with more ranks than have numbers.

    Raises:
        ConfigError: there are too many; the message names the largest of the fields.
    """
    replicas = document.get("torchft", {}).get("replicas", 0)
    nodes = max(spec.num_logins, replicas)
    if nodes * spec.nproc <= RANKS_MAX:
        return
    fields = ("nproc", "nodes", "spares", "nodes_max", "remote")
    given = {name: getattr(spec, name) for name in fields}
    given["torchft.replicas"] = replicas
    name = max(given, key=lambda name: given[name])
    raise ConfigError(
        f"{source}{_find_line(source, name.split('.'))}: {name} = {given[name]}: "
        f"{nodes} nodes x {spec.nproc} ranks are more than {RANKS_MAX}",
        hint=f"a job has at most {RANKS_MAX} ranks; nproc counts those of one node",
    )


def _find_line(source: str, keys: list[str]) -> str:
    """Return `, line N` where `source` is a TOML file that sets `keys`; empty where it is none."""
    if not source.endswith(".toml"):
        return ""
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    number = find_line(text, keys)
    return f", line {number}" if number else ""


def _list_option_notes(options: RunOptions, spec: JobSpec) -> list[str]:
    given = options.map_rendezvous()
    notes = [] if read_rendezvous(given, options.environ) else list_rdzv_notes(given)
    more = (
        (spec.observe, "observed only: nothing is acted upon; a rank that fails ends the job"),
        (
            options.monitor_interval is not None,
            "--monitor-interval ignored: the kernel tells of every exit at once",
        ),
        (
            options.start_method is not None,
            "--start-method ignored: ranks are forked from a warm image; --cold executes",
        ),
    )
    return [*notes, *(text for given, text in more if given)]


RANKS_MAX = 65_536
"""Ranks of all nodes: a rank's number has 16 bits where ranks record their collectives."""
_BUCKETS = {"s3": ("s3", "s3fs"), "gs": ("gcs", "gcsfs"), "gcs": ("gcs", "gcsfs")}
"""Scheme of a URL -> perdure's extra, and the module that it brings for fsspec."""
_TRACKERS = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
"""Tracker -> the package that is installed for it."""
FREE_BYTES_MIN = 64 << 20
"""Below this much free space a journal and logs would soon fail."""
_STRING_MAX = 128 << 10
"""Bytes of one variable or argument, with its end, that Linux hands to a program."""
_STRINGS_MAX = 6 << 20
"""Bytes of all of them where the limit of the stack, of which they may fill a quarter, is high."""
_OWN = 32 << 10
"""Bytes of these that are kept for perdure's own variables."""


def check_job(spec: JobSpec, home: str, environ: dict[str, str]) -> list[str]:
    """Check everything; return notes worth showing.

    Raises:
        ConfigError: the script cannot run.
        PlatformError: the machine cannot take the job.
    """
    notes: list[str] = []
    if spec.no_python:
        check_program(spec)
    elif spec.module:
        check_module(spec)
    else:
        notes = check_script(spec)
    check_environment(spec, environ)
    check_names(spec, home)
    check_folder(home)
    url = spec.checkpoint.url
    if url and "://" not in url:
        check_folder(url)
        check_owner(url, spec.name)
    extra, module = _BUCKETS.get(url.partition("://")[0], ("", ""))
    if extra and find_spec(module) is None:
        raise ConfigError(
            f"checkpoint.url = {url} needs {module}", hint=f"pip install 'perdure[{extra}]'"
        )
    notes += check_torch_version(read_installed("torch"))
    notes += [
        f"tracking.{kind}: {_TRACKERS[kind]} is not installed, so nothing is told there; "
        f"pip install 'perdure[{kind}]'"
        for kind in spec.tracking.targets
        if not read_installed(_TRACKERS[kind])
    ]
    return notes + check_devices(spec, environ)


_SPAWNS = re.compile(
    rb"^[^#\n]{0,400}?\b(?:(?:mp|multiprocessing)\.spawn|notebook_launcher|debug_launcher)\s*\(",
    re.MULTILINE,
)


def check_script(spec: JobSpec) -> list[str]:
    """Check that the script is a readable file whose syntax this Python accepts; return notes.

    Raises:
        ConfigError: otherwise; the hint names files of similar names, the message the line.
    """
    path = os.path.join(spec.cwd, os.path.expanduser(spec.script))
    if os.path.isdir(path) and os.path.isfile(os.path.join(path, "__main__.py")):
        return []
    try:
        source = read_file(path, follow=True)
    except FileNotFoundError:
        folder, name = os.path.split(path)
        names = os.listdir(folder) if os.path.isdir(folder) else []
        near = get_close_matches(name, names, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"looked in {folder or '.'}"
        raise ConfigError(f"no such script: {spec.script}", hint=hint) from None
    except UnfitFileError as error:
        raise ConfigError(
            f"cannot run {spec.script}: {error.strerror}",
            hint="each start reads the script again; write it to a file",
        ) from None
    except IsADirectoryError:
        hint = "name a Python file, or a directory with a __main__.py"
        raise ConfigError(f"{spec.script} is a directory", hint=hint) from None
    except OSError as error:
        raise ConfigError(
            f"cannot read {spec.script}: {error.strerror}", hint="check its permissions"
        ) from error
    if source.startswith(MAGIC_NUMBER) or zipfile.is_zipfile(path):  # Python runs these as well.
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, spec.script, "exec", dont_inherit=True)
    except SyntaxError as error:
        text = (error.text or "").strip()
        raise ConfigError(
            f"{spec.script}, line {error.lineno}: {error.msg}" + (f": {text}" if text else ""),
            hint=f"Python {sys.version.split()[0]} cannot compile it; nothing was started",
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"{spec.script}: not Python source: {error}",
            hint="--no-python runs a program, -m a module",
        ) from None
    if found := _SPAWNS.search(source):
        line = source[: found.end()].count(b"\n") + 1
        return [
            f"{spec.script}, line {line} makes processes of its own, which nobody here watches: "
            "each rank would start a world in itself, so let it train in the process that it is, "
            "with RANK and WORLD_SIZE from the environment as under torchrun"
        ]
    return []


def check_program(spec: JobSpec) -> None:
    """Check that the program can be executed.

    Raises:
        ConfigError: it cannot.
    """
    path = spec.script
    found = shutil.which(path) or shutil.which(os.path.join(spec.cwd, path))
    if found is None or os.path.isdir(found):
        raise ConfigError(
            f"no such program: {spec.script}", hint="a name on PATH, or a path to an executable"
        )


def check_module(spec: JobSpec) -> None:
    """Check that the module can be found, without importing its packages.

    Raises:
        ConfigError: it cannot; the message says which part of its name.
    """
    path: list[str] | None = [spec.cwd, *sys.path]
    parts = spec.script.split(".")
    found: ModuleSpec | None = None
    for index, part in enumerate(parts):
        found = PathFinder.find_spec(part, path) if part and path else None
        if found is None:
            whole = ".".join(parts[: index + 1])
            raise ConfigError(
                f"no such module: {whole}",
                hint="looked in the working directory and on sys.path of " + sys.executable,
            )
        places = found.submodule_search_locations
        path = list(places) if places is not None else None
    if path is not None and PathFinder.find_spec("__main__", path) is None:
        raise ConfigError(
            f"{spec.script} is a package without a __main__ module", hint="name one of its modules"
        )


def check_environment(spec: JobSpec, environ: Mapping[str, str]) -> None:
    """Check that a program can be executed with the job's variables and arguments.

    Raises:
        ConfigError: Linux would refuse; the message names the variable, or the largest of all.
    """
    for name in spec.env:
        if not name or "=" in name:
            raise ConfigError(f"env: `{name}` is no name of a variable", hint="[env] NAME = VALUE")
    texts = {name: f"{name}={value}" for name, value in environ.items() if name not in spec.env}
    texts |= {f"env.{name}": f"{name}={value}" for name, value in spec.env.items()}
    texts |= {f"args[{index}]": text for index, text in enumerate(spec.args)}
    sizes = {what: len(text.encode(errors="replace")) + 1 for what, text in texts.items()}
    largest, size = max(sizes.items(), key=lambda item: item[1], default=("", 0))
    hint = "write it to a file, and hand the script the file's path"
    if size > _STRING_MAX:
        raise ConfigError(
            f"{largest}: {size:,} bytes, and Linux hands a program at most {_STRING_MAX:,} in one",
            hint=hint,
        )
    total = sum(sizes.values()) + struct.calcsize("P") * len(sizes)
    total_max = min(os.sysconf("SC_ARG_MAX"), _STRINGS_MAX) - _OWN
    if total > total_max:
        raise ConfigError(
            f"{total:,} bytes of variables and arguments for a rank, and Linux hands a program "
            f"at most {total_max:,}; the largest is {largest}, {size:,} bytes",
            hint=hint,
        )


def check_owner(folder: str, job: str) -> None:
    """Check that the checkpoints in `folder` are those of `job`, or nobody's.

    Raises:
        ConfigError: they are another job's.
        PlatformError: they cannot be read.
    """
    try:
        owner = read_owner(Path(folder))
    except OSError as error:
        raise PlatformError(
            f"cannot read {error.filename or folder}: {error.strerror}",
            hint="set checkpoint.url to a folder that you own",
        ) from error
    refuse_owner(folder, owner, job)


def check_names(spec: JobSpec, home: str) -> None:
    """Check that perdure can write down the names of its own folders.

    Raises:
        ConfigError: one is not UTF-8.
    """
    folders = {"PERDURE_HOME": home, "log_dir": spec.log_dir, "checkpoint.url": spec.checkpoint.url}
    for what, folder in folders.items():
        if carry_text(folder) != folder:
            raise ConfigError(
                f"{what}: {make_encodable(folder)}: the name of this folder is not UTF-8",
                hint="name another folder; arguments, variables, and the working folder may be so",
            )


def check_folder(folder: str) -> None:
    """Check that files can be made in `folder` and that the disk has room.

    Raises:
        PlatformError: otherwise.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"perdure")
            file.flush()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise PlatformError(
            f"cannot write to {folder}: {error.strerror}",
            hint="make room, or choose another place with PERDURE_HOME or checkpoint.url",
        ) from error
    if free < FREE_BYTES_MIN:
        raise PlatformError(
            f"no space left: {free >> 20} MiB free at {folder}, and a job takes at least "
            f"{FREE_BYTES_MIN >> 20} MiB, its checkpoints not counted",
            hint="make room, or choose another place with PERDURE_HOME or checkpoint.url",
        )


def check_torch_version(version: str) -> list[str]:
    """Return what is to be said of the torch that ranks would import; nothing where it is tested.

    >>> check_torch_version("2.9.1+cu128"), check_torch_version("")
    ([], [])
    """
    if not version or TORCH_MIN <= read_version(version) < TORCH_END:
        return []
    return [f"torch {version}: perdure is tested with {TESTED_TORCHES}"]


def check_devices(spec: JobSpec, environ: dict[str, str]) -> list[str]:
    """Return what is remarkable about devices and threads; as torchrun, say what is defaulted.

    Nothing is refused: whether a script needs a GPU for each rank only the script knows.
    """
    ranks, gpus = spec.local_ranks, len(list_visible_gpus({**environ, **spec.env}))
    threads = explain_default_threads(spec, environ)
    notes = [threads] if threads else []
    if gpus and ranks > gpus and spec.groups:
        notes.append(f"{spec.groups} replica groups of {spec.nproc} share {gpus} visible GPUs")
    elif gpus and ranks > gpus:
        notes.append(
            f"{ranks} ranks and {gpus} visible GPUs: "
            "a script that takes one GPU by LOCAL_RANK will fail, and so will NCCL"
        )
    elif not gpus and ranks > (cores := count_cpus()):
        notes.append(f"{ranks} ranks share {cores} cores and no GPU: expect them to be slower")
    return notes


def choose_name(spec: JobSpec, home: str) -> JobSpec:
    """Return the job under a name of its own: the script's, numbered while such a job lives."""
    base = name_after(spec.script.rsplit(".", 1)[-1] if spec.module else Path(spec.script).stem)
    name, number = base, 2
    while is_alive(paths_of(home, name)):
        name, number = f"{base}-{number}", number + 1
    return msgspec.structs.replace(spec, name=name)


def name_after(stem: str) -> str:
    """Return the name of a job that is called as its script is.

    >>> name_after("my train (2)"), name_after("__")
    ('my-train-2', 'job')
    """
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip("-._")[:56] or "job"
