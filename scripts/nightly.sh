#!/usr/bin/env bash
# Runs the torchft tests with torchft-nightly, in a copy of .venv that differs in it alone.
set -euo pipefail
cd "$(dirname "$0")/.."
NIGHTLY="${NIGHTLY:-torchft-nightly==2026.10.26}"
copy=.venv-nightly
stamp=$copy/.perdure-nightly
pip() { "$copy/bin/python" -m pip --disable-pip-version-check -q "$@"; }

if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$NIGHTLY" ]; then
  printf 'nightly: making %s with %s\n' "$copy" "$NIGHTLY"
  rm -rf "$copy"
  cp -al .venv "$copy" # Hard links: pip and sed put new files in the place of old ones.
  grep -rlI "$PWD/.venv" "$copy/bin" "$copy/pyvenv.cfg" | xargs -r sed -i "s#$PWD/.venv#$PWD/$copy#g"
  pip uninstall -y torchft
  pip install --no-deps "$NIGHTLY"
  printf '%s' "$NIGHTLY" >"$stamp"
fi
"$copy/bin/python" -c 'import torchft; from importlib.metadata import version
print("nightly: torchft-nightly", version("torchft-nightly"), "in", torchft.__path__[0])'
[ $# -gt 0 ] || set -- tests/e2e/test_torchft.py tests/unit/worker/test_replica_checkpoint.py
exec "$copy/bin/python" -m pytest -q "$@"
