#!/usr/bin/env bash
# The set-up of a fresh machine; says each thing in one line as it happens; safe to repeat.
# setup.sh [all | demo | docs]: everything that tests need; torch and perdure; those and MkDocs.
set -euo pipefail
cd "$(dirname "$0")/.."
TORCH="${TORCH:-torch==2.13.0}"
parts="${1:-all}"
case "$parts" in all | demo | docs) ;; *) echo "usage: $0 [all | demo | docs]" >&2; exit 2 ;; esac
say() { printf 'setup: %s\n' "$*"; }

python=""
for candidate in "${PYTHON:-}" python3.11 python3 python3.12 python3.13; do
  if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 &&
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python="$candidate"
    break
  fi
done
[ -n "$python" ] || { say "no Python 3.11 or newer found; install one, or set PYTHON=/path/to/it" >&2; exit 3; }

if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
  say "installing Debian's python3-venv"
  sudo=""; [ "$(id -u)" = 0 ] || sudo=sudo
  $sudo apt-get update -qq && $sudo apt-get install -y -qq python3-venv >/dev/null
fi

if [ "$parts" = all ]; then
  missing=""
  [ -x /usr/sbin/sshd ] || missing="$missing openssh-server"
  for tool in rsync tmux cron chromium; do command -v "$tool" >/dev/null || missing="$missing $tool"; done
  if [ -n "$missing" ] && command -v apt-get >/dev/null; then
    say "installing$missing for tests, which skip without them"
    sudo=""; [ "$(id -u)" = 0 ] || sudo="sudo -n"
    { $sudo apt-get update -qq && $sudo apt-get install -y -qq $missing; } >/dev/null 2>&1 || say "they cannot be had"
  fi
fi

all_stamp=.venv/.perdure-setup
stamp="$all_stamp"
[ "$parts" = all ] || stamp="$all_stamp-$parts"
want="$(sha256sum pyproject.toml lab/pyproject.toml scripts/setup.sh scripts/constraints.txt | sha256sum) $TORCH ${THIRDPARTY:-1} ${LATEST:-0}"
build_native() { # 15 s of one core, once for a torch and a source; without it, a fallback.
  said="$(.venv/bin/python -m perdure.worker.native 2>&1)" || say "$said"
}
is_done() { [ -f "$1" ] && [ "$(cat "$1")" = "$want" ]; }
if is_done "$stamp" ||
  { [ "$parts" = demo ] && { is_done "$all_stamp" || is_done "$all_stamp-docs"; }; }; then
  build_native
  exit 0
fi
[ -x .venv/bin/python ] || { say "making .venv with $("$python" --version)"; "$python" -m venv .venv; }
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
# A new release of a library must not fail the tests. LATEST=1 takes the newest versions instead.
pinned="-c scripts/constraints.txt"
[ "${LATEST:-0}" != 1 ] || pinned="--upgrade"
install() {
  if pip install -q $pinned "$@"; then return; fi
  [ "$pinned" != --upgrade ] || return 1
  say "the versions of scripts/constraints.txt cannot be installed; trying others"
  want="$want, other versions"  # The next set-up tries those of the file again.
  pip install -q "$@"
}
if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
  # Alone and first: a later resolution would pick the newest build with its CUDA packages.
  say "installing $TORCH"
  install "$TORCH" numpy
fi
case "$parts" in
  all) say "installing perdure with its tools, nats-server among them"; extra="[dev]" ;;
  demo) say "installing perdure, nats-server and the live page with it"; extra="[dash]" ;;
  docs) say "installing perdure and MkDocs"; extra="[docs]" ;;
esac
install -e ".$extra" -e ./lab
if [ "$parts" = all ] && [ "${THIRDPARTY:-1}" = 1 ]; then
  say "installing Hugging Face, Lightning and torchft for tests/third_party (THIRDPARTY=0 leaves them out)"
  constraint=.venv/.perdure-torch  # None of them may bring another torch, with its CUDA packages.
  .venv/bin/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >"$constraint"
  if ! timeout 900 .venv/bin/python -m pip --disable-pip-version-check --retries 2 \
    install -q $pinned -c "$constraint" -e ".[thirdparty]" >.venv/.perdure-thirdparty.log 2>&1; then
    say "they cannot be had (see .venv/.perdure-thirdparty.log): tests/third_party will skip; \`rm $stamp\` tries again"
  fi
fi
say "building the recorder of collectives for this torch, and the NCCL plugin"
build_native
.venv/bin/python -c 'import perdure, torch; print(f"setup: perdure {perdure.__version__}, torch {torch.__version__}")'
printf '%s' "$want" >"$stamp"
