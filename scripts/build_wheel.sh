#!/usr/bin/env bash
# A wheel of perdure-lab, and one of perdure that carries what is compiled: the recorder for the torch of each Python named (default:
# that of .venv), and the NCCL plugin. No compiler is needed where it is installed.
#   scripts/build_wheel.sh [PYTHON ...]
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- .venv/bin/python
prebuilt=src/perdure/worker/native/prebuilt
rm -rf "$prebuilt"
trap 'rm -rf "$prebuilt"' EXIT
for python in "$@"; do
  PYTHONPATH=src "$python" -m perdure.worker.native --into "$prebuilt"
done
"$1" -m pip --disable-pip-version-check wheel -q --no-deps -w dist . ./lab
