#!/usr/bin/env bash
# What `make platforms` starts beside sshd: Slurm and its accounting. Without root or apt its tests skip.
set -euo pipefail
say() { printf 'setup: %s\n' "$*"; }

missing=""
need() { command -v "$1" >/dev/null || [ -x "/usr/sbin/$1" ] || missing="$missing $2"; }
need slurmctld slurm-wlm
need munged munge
need slurmdbd slurmdbd
need mariadbd mariadb-server
[ -n "$missing" ] || exit 0
command -v apt-get >/dev/null || { say "no apt-get: the tests that need$missing skip"; exit 0; }
sudo=""; [ "$(id -u)" = 0 ] || sudo="sudo -n"
say "installing$missing for the tests of Slurm; none of it is started as a service"
# The packages' scripts ask policy-rc.d whether they may start what they bring.
$sudo sh -c '
  policy=/usr/sbin/policy-rc.d
  [ -e "$policy" ] || { printf "#!/bin/sh\nexit 101\n" >"$policy"; chmod +x "$policy"; trap "rm -f $policy" EXIT; }
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
' sh $missing >/dev/null 2>&1 || say "they cannot be had: the tests that need them skip"
