"""The NoCloud seed of a VM: what makes it differ from its siblings.

A small ISO 9660 file system labelled ``cidata`` with ``meta-data`` and ``user-data``, which cloud-init reads at first
boot (cloud-init documentation, "NoCloud" data source).
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass

import pycdlib

LABEL = "cidata"
NO_USER_DATA = "#cloud-config\n{}\n"


@dataclass(frozen=True)
class Identity:
    """Who a VM is. ``ssh_keys`` are public keys; ``user_data`` is handed to cloud-init as it is."""

    vm: str
    instance_id: str
    ssh_keys: Sequence[str] = ()
    user_data: str | None = None

    @property
    def hostname(self) -> str:
        """The VM's name as a host name may be spelt (RFC 1123: letters, digits and hyphens)."""
        return self.vm.replace("_", "-").strip("-").lower()

    def meta_data(self) -> str:
        """The meta-data document: JSON, which is YAML."""
        data = {
            "instance-id": self.instance_id,
            "local-hostname": self.hostname,
            "public-keys": list(self.ssh_keys),
        }
        return json.dumps(data, indent=1) + "\n"


def seed_image(identity: Identity) -> bytes:
    """The content of the seed's ISO file."""
    iso = pycdlib.PyCdlib()
    iso.new(interchange_level=3, vol_ident=LABEL, joliet=3, rock_ridge="1.09")
    files = {"meta-data": identity.meta_data(), "user-data": identity.user_data or NO_USER_DATA}
    for name, text in files.items():
        content = text.encode()
        short = name.replace("-", "").upper()
        iso.add_fp(io.BytesIO(content), len(content), f"/{short}.;1", rr_name=name, joliet_path=f"/{name}")
    out = io.BytesIO()
    iso.write_fp(out)
    iso.close()
    return out.getvalue()
