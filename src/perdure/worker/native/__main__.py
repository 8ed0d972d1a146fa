"""`python -m perdure.worker.native [--into DIR]`: build what is compiled, for this torch."""

import argparse
import sys
from pathlib import Path

from perdure.model.errors import PlatformError
from perdure.worker.native.build import (
    PLUGIN_NAME,
    build,
    build_nccl_plugin,
    load_cost,
    measure_cost,
)


def main() -> int:
    """Build both, say where they are and what the recorder costs, or why there is none."""
    parser = argparse.ArgumentParser(prog="python -m perdure.worker.native", description=__doc__)
    parser.add_argument("--into", type=Path, help="for a wheel; default: the user's cache")
    into = parser.parse_args().into
    failed = False
    try:
        library = build(into)
        cost = (load_cost(library) if into is None else None) or measure_cost(library)
        print(f"{library}: {cost}", file=sys.stderr if isinstance(cost, str) else sys.stdout)
        failed = isinstance(cost, str)
    except PlatformError as error:
        print(f"perdure: the compiled recorder cannot be built: {error}", file=sys.stderr)
        failed = True
    try:
        print(build_nccl_plugin(into / PLUGIN_NAME if into else None))
    except PlatformError as error:
        print(f"perdure: ranks run without the NCCL plugin: {error}", file=sys.stderr)
        failed = True
    return 1 if failed else 0


raise SystemExit(main())
