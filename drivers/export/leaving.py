"""When the session of a child that may not read any more can be ended.

To remove an ACL of a target, the kernel ends the session, and waits until all commands of the session are answered.
The caller cannot be killed meanwhile, and holds the lock of the folder with the ACLs (Linux:
core_tpg_del_initiator_node_acl, iscsit_stop_session). A read may wait for as long as there is no device, or no parent.
So a session is ended only when none of its commands waits.
"""

from __future__ import annotations

import re

_CONNECTION = "Connection State"
_WINDOW = re.compile(r"^ 0x([0-9a-f]{8}) +0x([0-9a-f]{8}) ", re.MULTILINE)
"""How many commands the initiator may have under way, and how many more it may send now: CmdSN/WR and CmdSN/WC."""


def commands_wait(info: str) -> bool:
    """Whether commands of a session are not answered yet, by what the kernel says of it (Linux:
    drivers/target/iscsi/iscsi_target_configfs.c, lio_target_nacl_info_show). A connection that ends stays listed until
    its commands are answered. What cannot be understood counts as waiting.
    """
    if _CONNECTION not in info:
        return False
    window = _WINDOW.search(info)
    return window is None or int(window[2], 16) < int(window[1], 16)
