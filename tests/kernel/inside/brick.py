"""``brick.py connect|disconnect IP [force]``: do with a volume what Nova does on a host, by os-brick, in a guest.

os-brick's folder is in PYTHONPATH. The last line of the output is JSON: what os-brick returned.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["PATH"] += ":/lib/udev"  # where scsi_id is

import os_brick
from os_brick.initiator import connector
from os_brick.privileged import default
from oslo_config import cfg

TARGET = "iqn.2026-01.com.example:storage"


def main(act: str, ip: str) -> None:
    """Do it."""
    cfg.CONF([], project="brick")
    cfg.CONF.set_override("lock_path", "/run/brick", group="oslo_concurrency")
    os_brick.setup(cfg.CONF)
    default.set_client_mode(False)  # this process is root's: it needs no helper
    connect = connector.InitiatorConnector.factory("ISCSI", None, use_multipath=False, device_scan_attempts=20)
    volume = {"target_portal": f"{ip}:3260", "target_iqn": TARGET, "target_lun": 1, "target_discovered": False}
    told: Any = None
    if act == "connect":
        told = connect.connect_volume(volume)
    else:
        connect.disconnect_volume(volume, None, force="force" in sys.argv, ignore_errors="force" in sys.argv)
    print(json.dumps(told))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:3])
