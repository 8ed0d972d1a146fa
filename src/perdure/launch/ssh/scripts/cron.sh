#!/bin/sh
# Has the job started again after a reboot, by an entry in this user's crontab; `off` takes it out.
# It is written only after it was read: one that cannot be read is not one that is empty.
set -eu
. "$(dirname "$0")/env.sh"
mark="# perdure [@job@]" # A name may begin with another's.
kept="$JOB_DIR/launch/crontab"
umask 077
if ! LC_ALL=C crontab -l > "$kept.now" 2> "$kept.said"; then
  if ! grep -qi "no crontab\|can't open .*no such file" "$kept.said"; then
    echo "crontab -l failed, and nothing was changed: $(tail -n 1 "$kept.said")" >&2
    exit 1
  fi
  : > "$kept.now"
fi
[ -e "$kept.before" ] || cp "$kept.now" "$kept.before"
{
  grep -vF "$mark" "$kept.now" || true
  [ "${1:-}" = off ] || echo "@reboot sh '$JOB_DIR/launch/start.sh' after-boot $mark"
} > "$kept.next"
cmp -s "$kept.now" "$kept.next" || crontab - < "$kept.next" || {
  echo "crontab did not take it; yours is kept in $kept.before" >&2
  exit 1
}
