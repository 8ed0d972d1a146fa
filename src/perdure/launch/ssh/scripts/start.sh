#!/bin/sh
# Starts the job, detached from this connection. With `after-boot`: only what a reboot has ended.
set -eu
. "$(dirname "$0")/env.sh"
cd "$JOB_DIR/launch"
if [ "${1:-}" = after-boot ]; then
  "$PERDURE_PYTHON" box.py state . | grep -q '"state": "rebooted"' || exit 0
fi
@ways@
echo "start: this machine has none of: @tools@" >&2
exit 1
