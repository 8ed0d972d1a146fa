#!/bin/sh
# What runs detached: the supervisor, which starts perdure and writes down how it ended.
. "$(dirname "$0")/env.sh"
if [ -n "$CRED_FILE" ] && [ -r "$CRED_FILE" ]; then set -a; . "$CRED_FILE"; set +a; fi
cd "$JOB_DIR/project"
exec "$PERDURE_PYTHON" -P "$JOB_DIR/launch/box.py" supervise "$JOB_DIR/launch"
