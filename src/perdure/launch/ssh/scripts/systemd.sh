#!/bin/sh
# Has the job started again after a reboot, by a unit of this user's; `off` takes it out.
set -eu
. "$(dirname "$0")/env.sh"
name="perdure-@job@.service"
unit="$HOME/.config/systemd/user/$name"
if [ "${1:-}" = off ]; then
  systemctl --user disable "$name"
  rm -f "$unit"
  exit 0
fi
mkdir -p "$(dirname "$unit")"
cat > "$unit" <<UNIT
[Unit]
Description=perdure: @job@ goes on after a reboot
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh "$JOB_DIR/launch/start.sh" after-boot
[Install]
WantedBy=default.target
UNIT
systemctl --user enable "$name"
loginctl enable-linger
