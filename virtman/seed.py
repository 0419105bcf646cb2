"""The NoCloud seed of a VM: what makes it differ from its siblings.

A small ISO 9660 file system labelled ``cidata`` with ``meta-data`` and ``user-data``, which cloud-init reads at first
boot (cloud-init documentation, "NoCloud" data source).
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass

import pycdlib
from pycdlib.pycdlibexception import PyCdlibException

LABEL = "cidata"
NO_USER_DATA = "#cloud-config\n{}\n"


@dataclass(frozen=True)
class Identity:
    """Who a VM is. ``ssh_keys`` are public keys, None if nobody names any; cloud-init gets ``user_data`` as it is."""

    vm: str
    uuid: str
    ssh_keys: Sequence[str] | None = None
    user_data: str | None = None

    @property
    def hostname(self) -> str:
        """The VM's name as a host name may be spelt (RFC 1123: letters, digits and hyphens)."""
        return self.vm.replace("_", "-").strip("-").lower()

    def meta_data(self) -> str:
        """The meta-data document: JSON, which is YAML."""
        data = {
            "instance-id": self.uuid,
            "local-hostname": self.hostname,
            "public-keys": list(self.ssh_keys or ()),
        }
        return json.dumps(data, indent=1) + "\n"

    def files(self) -> dict[str, bytes]:
        """What the seed has in it, by name."""
        user_data = self.user_data or NO_USER_DATA
        return {"meta-data": self.meta_data().encode(), "user-data": user_data.encode()}


def seed_image(identity: Identity) -> bytes:
    iso = pycdlib.PyCdlib()
    iso.new(interchange_level=3, vol_ident=LABEL, joliet=3, rock_ridge="1.09")
    for name, content in identity.files().items():
        short = name.replace("-", "").upper()
        iso.add_fp(io.BytesIO(content), len(content), f"/{short}.;1", rr_name=name, joliet_path=f"/{name}")
    out = io.BytesIO()
    iso.write_fp(out)
    iso.close()
    return out.getvalue()


def is_seed_of(image: bytes, identity: Identity) -> bool:
    """Whether a seed says the same as a new one would, which differs by its dates at least."""
    iso = pycdlib.PyCdlib()
    with contextlib.suppress(PyCdlibException):
        iso.open_fp(io.BytesIO(image))
        return all(_read(iso, name) == content for name, content in identity.files().items())
    return False


def _read(iso: pycdlib.PyCdlib, name: str) -> bytes:
    out = io.BytesIO()
    iso.get_file_from_iso_fp(out, rr_path=f"/{name}")
    return out.getvalue()
