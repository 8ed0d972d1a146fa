#!/usr/bin/env bash
# Makes an environment with another torch, to test perdure with it: scripts/torch_env.sh VERSION PYTHON DIR
#   scripts/torch_env.sh 2.11.0 3.12 build/torch-2.11.0
# PYTHON is a version, or the path of one. Of a torch that is to be had only as a CUDA build, the
# build alone is downloaded, without CUDA's libraries: stubs take their place (scripts/stub_cuda.py),
# so it imports and runs on the CPU, and what would call CUDA ends the process. 1.1 GB when done.
# What was done is not done again: a run that broke off goes on where it was.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf 'torch_env: %s\n' "$*"; }
[ $# = 3 ] || { say "usage: scripts/torch_env.sh VERSION PYTHON DIR" >&2; exit 2; }
version=$1 wanted=$2 dir=$3

find_python() { # One that only a manager of Pythons knows is found in its folders.
  local one
  for one in "$wanted" "python$wanted" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$wanted".*/bin/python; do
    one="$(command -v "$one" 2>/dev/null || true)"
    if [ -n "$one" ] && "$one" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s' "$one"
      return
    fi
  done
}
python="$(find_python)"
[ -n "$python" ] || { say "there is no Python $wanted here (3.11 or newer is needed)" >&2; exit 3; }

stamp="$dir/.perdure-torch"
want="$version $("$python" -c 'import sys; print(sys.version)') $(cat pyproject.toml lab/pyproject.toml scripts/torch_env.sh scripts/stub_cuda.py | sha256sum)"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then exit 0; fi
free="$(df --output=avail -BG "$(dirname "$dir")" 2>/dev/null | tail -1 | tr -dc 0-9 || true)"
[ "${free:-9}" -ge 4 ] || { say "$free GB are free; 4 are needed while a build is unpacked" >&2; exit 3; }

if ! "$dir/bin/python" -c '' 2>/dev/null; then
  say "making $dir with $("$python" --version)"
  "$python" -m venv "$dir"
fi
pip() { "$dir/bin/python" -m pip --disable-pip-version-check -q "$@"; }
add() { # pip complains of CUDA's libraries, which are left out on purpose: it is heard where it fails.
  pip install "$@" >"$dir/pip.log" 2>&1 || { cat "$dir/pip.log" >&2; exit 3; }
}
site="$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
read_installed() { # What is said of a package by its own file: torch may not be importable yet.
  "$dir/bin/python" -c "from importlib.metadata import $1 as ask; print(*(ask('torch') if '$1' == 'requires' else [ask('torch')]), sep='\n')" 2>/dev/null || true
}

case "$(read_installed version)" in
  "$version" | "$version"+*) ;;
  *)
    wheels="$dir/wheels" # Kept until it is installed, so that a broken download costs only itself.
    mkdir -p "$wheels"
    if ! ls "$wheels"/torch-"$version"*.whl >/dev/null 2>&1; then
      say "downloading torch $version"
      pip download --no-deps -d "$wheels" "torch==$version+cpu" >/dev/null 2>&1 ||
        pip download --no-deps -d "$wheels" "torch==$version" ||
        { say "torch $version for Python $wanted is not to be had" >&2; exit 3; }
    fi
    say "unpacking it"
    add --no-deps --no-compile "$wheels"/torch-"$version"*.whl
    rm -rf "$wheels"
    ;;
esac
# What only CUDA's own tools and solvers use, which are loaded when they are called.
rm -rf "$site"/torch/bin/ptxas "$site"/torch/lib/libtorch_cuda_linalg.so

requires="$(read_installed requires | sed 's/;.*//; s/ //g')"
plain="$(grep -vE '^(nvidia-|cuda-|triton|optree|opt-einsum|pyyaml)' <<<"$requires" || true)"
say "installing what it needs of Python, perdure, and the tools of its tests"
add $plain
if [ -e "$site/torch/lib/libtorch_cuda.so" ]; then
  runtime="$(grep -E '^nvidia-cuda-runtime' <<<"$requires" || true)"
  toolkit="$(sed -nE 's/^cuda-toolkit.*==([0-9]+\.[0-9]+).*/\1/p' <<<"$requires")"
  add --no-deps "${runtime:-nvidia-cuda-runtime==$toolkit.*}"
  "$dir/bin/python" scripts/stub_cuda.py "$site"
fi
add -e . -e ./lab numpy hypothesis psutil pytest pytest-asyncio pytest-timeout
"$dir/bin/python" -c 'import torch; print("torch_env: torch", torch.__version__, "adds", (torch.ones(2) + 1).tolist())'
said="$("$dir/bin/python" -m perdure.worker.native 2>&1)" || say "$said"
printf '%s' "$want" >"$stamp"
say "$dir: $(du -sh "$dir" | cut -f1)"
