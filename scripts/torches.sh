#!/usr/bin/env bash
# Runs the tests that know torch best with each torch that perdure supports, and other Pythons with it.
# TORCHES names others: "2.12.1:3.12 2.10.0:3.11". Environments are made in build/ and kept (1.3 to 2 GB each).
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf 'torches: %s\n' "$*"; }
[ $# -gt 0 ] || set -- tests/unit/worker tests/e2e/test_elastic_inplace.py tests/e2e/test_elastic_sharded.py
own="$(.venv/bin/python -c 'import sys; from importlib.metadata import version
print(version("torch").partition("+")[0], "%d.%d" % sys.version_info[:2], sep=":")')"
failed="" missing=""
for one in ${TORCHES:-$own 2.11.0:3.12 2.10.0:3.13 2.9.1:3.11}; do
  version="${one%:*}" python="${one#*:}"
  dir="build/torch-$version-$python"
  [ "$one" != "$own" ] || dir=.venv
  if [ "$dir" != .venv ] && ! scripts/torch_env.sh "$version" "$python" "$dir"; then
    missing="$missing $one"
    continue
  fi
  say "torch $version, Python $python"
  # Torch's own checkpoints warn of torch's own storage until 2.10, and the tests make errors of warnings.
  "$dir/bin/python" -m pytest -q -m "not long" -W 'ignore:TypedStorage is deprecated:UserWarning' "$@" ||
    failed="$failed $one"
done
[ -z "$missing" ] || say "not to be had here:$missing"
[ -z "$failed" ] || { say "failed with$failed"; exit 1; }
