#!/usr/bin/env bash
# A wheel that carries the compiled recorder for the torch of .venv (or of $PYTHON).
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
prebuilt=src/perdure/worker/native/prebuilt
rm -rf "$prebuilt"
trap 'rm -rf "$prebuilt"' EXIT
"$python" -c "from pathlib import Path; from perdure.worker.native.build import build; print(build(Path('$prebuilt')))"
rm -f "$prebuilt/.lock"
"$python" -m pip wheel --no-deps -w dist .
