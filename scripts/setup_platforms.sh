#!/usr/bin/env bash
# What `make platforms` starts beside sshd: Slurm and its accounting. Without root or apt its tests skip.
set -euo pipefail
say() { printf 'setup: %s\n' "$*"; }

missing=""
need() { command -v "$1" >/dev/null || [ -x "/usr/sbin/$1" ] || missing="$missing $2"; }
find_missing() {
  missing=""
  need slurmctld slurm-wlm
  need munged munge
  need slurmdbd slurmdbd
  need mariadbd mariadb-server
}
find_missing
[ -n "$missing" ] || exit 0
skip="the tests that need$missing skip"
command -v apt-get >/dev/null || { say "no apt-get: $skip"; exit 0; }
sudo=""
if [ "$(id -u)" != 0 ]; then
  sudo="sudo -n"
  $sudo true 2>/dev/null || { say "no root: $skip"; exit 0; }
fi
say "installing$missing for the tests of Slurm; none of it is started as a service"
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
# The packages' scripts ask policy-rc.d whether they may start what they bring.
$sudo sh -c '
  policy=/usr/sbin/policy-rc.d
  [ -e "$policy" ] || { printf "#!/bin/sh\nexit 101\n" >"$policy"; chmod +x "$policy"; trap "rm -f $policy" EXIT; }
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
' sh $missing >"$log" 2>&1 || true
find_missing
if [ -n "$missing" ]; then
  say "${missing# } cannot be had: $(grep -m 1 '^E: ' "$log" || tail -n 1 "$log"); the tests that need it skip"
fi
