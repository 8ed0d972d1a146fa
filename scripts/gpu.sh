#!/usr/bin/env bash
# Proves the GPU path on one GPU: scripts/gpu.sh 1|2|3|all --out DIR [--dry] [--only G11,G17]
# It runs from the source tree, without a network: with .venv where there is one, else with PYTHON
# (python3) and the wheels that scripts/gpu_bundle.sh has put into .gpu-bundle.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf 'gpu: %s\n' "$*" >&2; }

python="${PYTHON:-}"
if [ -z "$python" ]; then
  python=.venv/bin/python
  [ -x "$python" ] || python="$(command -v python3 || true)"
fi
[ -n "$python" ] || { say "there is no Python here; set PYTHON"; exit 3; }
if [ -d .gpu-bundle ] && ! "$python" -c 'import msgspec, nats' 2>/dev/null; then
  site="$PWD/.gpu-bundle/site"
  if [ ! -f "$site/.unpacked" ]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" .gpu-bundle/*.whl
    touch "$site/.unpacked"
  fi
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PATH="$site/bin:$PATH"
fi
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "$python" -m tests.gpu.kit "$@"
