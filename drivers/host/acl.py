"""Access for more than one group (acl(5)), as the kernel keeps it in an extended attribute (xattr(7))."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence
from pathlib import Path

_NAME = "system.posix_acl_access"
_HEAD, _ENTRY = struct.Struct("<I"), struct.Struct("<HHI")
_VERSION = 2
_USER_OBJ, _GROUP_OBJ, _GROUP, _MASK, _OTHER = 0x01, 0x04, 0x08, 0x10, 0x20
_NOBODY = 0xFFFFFFFF
"""The ``id`` of entries that need none (Linux: include/uapi/linux/posix_acl_xattr.h)."""
_ALL, _PASS, _NOTHING = 7, 1, 0
_NONE = (errno.ENODATA, errno.EOPNOTSUPP)


def let_pass(folder: Path, groups: Sequence[int]) -> None:
    """Let the folder's own group and these pass through it, its owner do all, and others nothing.

    Without ``groups`` only what the mode says holds again, which a file system without lists does at any time. Raises
    OSError.
    """
    if not groups:
        try:
            os.removexattr(folder, _NAME)
        except OSError as error:
            if error.errno not in _NONE:
                raise
        return
    entries = [(_USER_OBJ, _ALL, _NOBODY), (_GROUP_OBJ, _PASS, _NOBODY)]
    entries += [(_GROUP, _PASS, gid) for gid in sorted({*groups})]
    entries += [(_MASK, _PASS, _NOBODY), (_OTHER, _NOTHING, _NOBODY)]
    os.setxattr(folder, _NAME, _HEAD.pack(_VERSION) + b"".join(_ENTRY.pack(*entry) for entry in entries))
