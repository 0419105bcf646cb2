#!/bin/sh
# Tells OpenNebula's scheduler what VirtMan has on this host. A probe that fails puts the host into error: this one does not.
set -u

library=$(dirname "$0")/../../../../tm/virtman/opennebula_tm
if ! report=$(timeout 15 python3 -B "$library/driver/placement.py" 2>/dev/null); then
  report='VIRTMAN = "NO"
VIRTMAN_STATE = "broken"'
fi
printf '%s\n' "$report"
