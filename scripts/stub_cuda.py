"""Makes a CUDA build of torch importable where there is no CUDA, so that its version can be tested.

    python scripts/stub_cuda.py SITE_PACKAGES

For every library that torch's own name as needed, and that is neither there nor the system's, a
shared object is compiled that exports exactly the symbols, with their version nodes, that torch
asks for. Calling one ends the process: no test may. The real libcudart, whose initialisers run at
import, has to be there (`nvidia-cuda-runtime`, 2 MB). A second run finds all and does nothing.
"""

import collections
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PREFIXES = {
    "cublas": r"cublas(?!Lt)", "cublasLt": "cublasLt", "cuda": "cu[A-Z]", "cudart": "cuda",
    "cudnn": "cudnn", "cufft": "cufft", "cufile": "cuFile", "cupti": "cupti", "curand": "curand",
    "cusolver": "cusolver", "cusparse": "cusparse(?!Lt)", "cusparseLt": "cusparseLt",
    "nccl": "p?nccl", "nvJitLink": "(__)?nvJitLink", "nvToolsExt": "nvtx", "nvrtc": "nvrtc",
    "nvshmem": "nvshmem",
}  # fmt: skip
"""How the names begin that a library exports without a version node."""

Wanted = set[tuple[str, str]]
"""Symbols and their version nodes; an empty node where torch names none."""


def run(*command: str) -> str:
    """Return what `command` prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read_needs(libraries: list[Path]) -> tuple[set[str], Wanted, dict[str, str]]:
    """Return the sonames that torch needs, the symbols it wants, and whose a version node is."""
    needed: set[str] = set()
    wanted: Wanted = set()
    owners: dict[str, str] = {}
    for path in libraries:
        needed |= set(re.findall(r"NEEDED.*\[(.+?)\]", run("readelf", "-dW", str(path))))
        blocks = r"File: (\S+)\s+Cnt: \d+\n((?:\s+0x.*Name: .*\n)+)"
        for soname, names in re.findall(blocks, run("readelf", "-VW", str(path))):
            owners |= dict.fromkeys(re.findall(r"Name: (\S+)", names), soname)
        for line in run("readelf", "--dyn-syms", "-W", str(path)).splitlines():
            words = line.split()
            if len(words) >= 8 and words[6] == "UND":
                name, _, node = words[7].partition("@")
                wanted.add((name, node.lstrip("@")))
    return needed, wanted, owners


def compile_stub(soname: str, target: Path, wanted: Wanted, owners: dict[str, str]) -> int:
    """Compile the stub of `soname` into `target`; return how many symbols it exports."""
    stem = re.sub(r"^lib|(_host|_static)?\.so.*$", "", soname)
    prefix = PREFIXES.get(stem)
    nodes: dict[str, list[str]] = collections.defaultdict(list)
    bare: set[str] = set()
    for name, node in sorted(wanted):
        if node and owners.get(node) == soname:
            nodes[node].append(name)
        elif not node and prefix and re.match(prefix, name):
            bare.add(name)
    names = sorted({name for some in nodes.values() for name in some} | bare)
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "stub.c"), Path(folder, "stub.map")
        functions = (f"void {name}(void) {{ abort(); }}\n" for name in names)
        source.write_text("#include <stdlib.h>\n" + "".join(functions))
        script.write_text(
            "".join(f"{n} {{ global: {'; '.join(some)}; }};\n" for n, some in nodes.items())
        )
        by_node = [f"-Wl,--version-script={script}"] if nodes else []
        command = ["gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{soname}", *by_node]
        run(*command, "-o", str(target / soname), str(source))
    return len(names)


def main(site: Path) -> None:
    """Compile what is missing below `site`, a folder of packages."""
    libraries = [p for p in (site / "torch/lib").glob("*.so*") if not p.is_symlink()]
    there = {path.name for path in (*libraries, *site.glob("nvidia/**/*.so*"))}
    there |= set(re.findall(r"^\s+(\S+) \(", run("/sbin/ldconfig", "-p"), re.MULTILINE))
    needed, wanted, owners = read_needs(libraries)
    missing = sorted(name for name in needed - there if not name.startswith("ld-linux"))
    for soname in missing:
        count = compile_stub(soname, site / "torch/lib", wanted, owners)
        print(f"stub of {soname}: {count} symbols")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
