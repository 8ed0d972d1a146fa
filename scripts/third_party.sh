#!/usr/bin/env bash
# Runs published libraries' own saves under perdure, in a copy of .venv that has these libraries.
# third_party.sh [PYTEST ARGUMENT ...]
set -euo pipefail
cd "$(dirname "$0")/.."
LIBRARIES="lightning==2.6.6 accelerate==1.15.0 transformers==5.24.0 submitit==1.5.4 tyro==1.0.5
s3fs==2026.9.0 moto[server]==5.2.5"
ALONE="timm==1.0.31 torchtitan==0.3.0" # Only their savers are used: what they require is left out.
DEEPSPEED="${DEEPSPEED:-deepspeed==0.19.8}"
copy=.venv-third-party
stamp=$copy/.perdure-third-party
want="$LIBRARIES $ALONE $DEEPSPEED"
pip() { "$copy/bin/python" -m pip --disable-pip-version-check -q "$@"; }

if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$want" ]; then
  printf 'third-party: making %s: %s\n' "$copy" "$(echo $want)"
  rm -rf "$copy"
  cp -al .venv "$copy" # Hard links: pip and sed put new files in the place of old ones.
  grep -rlI "$PWD/.venv" "$copy/bin" "$copy/pyvenv.cfg" | xargs -r sed -i "s#$PWD/.venv#$PWD/$copy#g"
  # No library may bring another torch, with its CUDA packages.
  "$copy/bin/python" -c 'from importlib.metadata import version
print("torch==" + version("torch"))' >"$copy/constraints.txt"
  pip install -c "$copy/constraints.txt" $LIBRARIES setuptools wheel ninja
  pip install --no-deps $ALONE
  # DeepSpeed's set-up imports torch. Its C++ parts are compiled when a script first uses them.
  DS_BUILD_OPS=0 pip install --no-build-isolation -c "$copy/constraints.txt" "$DEEPSPEED"
  printf '%s' "$want" >"$stamp"
fi
[ $# -gt 0 ] || set -- tests/third_party
exec "$copy/bin/python" -m pytest -q -m "" "$@"
