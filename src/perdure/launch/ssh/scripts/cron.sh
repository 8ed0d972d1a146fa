#!/bin/sh
# Has the job started again after a reboot, by an entry in this user's crontab; `off` takes it out.
. "$(dirname "$0")/env.sh"
mark="# perdure [@job@]" # A name may begin with another's.
{
  crontab -l 2>/dev/null | grep -vF "$mark"
  [ "${1:-}" = off ] || echo "@reboot sh '$JOB_DIR/launch/start.sh' after-boot $mark"
} | crontab -
