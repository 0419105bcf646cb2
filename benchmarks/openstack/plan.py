"""What a wave is: how many servers of what image on how many computes, and Nova's settings, the same for all ways."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import MIB
from benchmarks.spreadimage import SpreadImage

GIB_MIB = 1024
BOOT_SET_MIB = 60
VIRTMAN, IMAGE, VOLUME, NOTHING = "virtman", "image", "volume", "nothing"
WAYS = (NOTHING, VIRTMAN, IMAGE, VOLUME)
"""Of getting servers their disks, in the order in which they are measured. ``nothing`` are servers without a disk:
what Nova itself takes."""


@dataclass(frozen=True)
class Plan:
    """Sizes in MiB. ``cinder_at_once``: volumes that Cinder copies at the same time."""

    servers: int
    computes: int
    size: int
    data: int
    cinder_at_once: int

    @property
    def image(self) -> SpreadImage:
        """What all servers boot from."""
        return SpreadImage(self.size, self.data)

    @property
    def gib(self) -> int:
        """What a flavor and a volume need, which know whole GiB."""
        return -(-self.size // GIB_MIB)

    def room(self, way: str) -> int:
        """MiB of disk that a way needs besides the image."""
        return {
            NOTHING: 0,
            VIRTMAN: self.data + self.computes * BOOT_SET_MIB,  # the base, and what each host reads of it
            IMAGE: 2 * self.computes * self.data,  # as it came, and as raw
            VOLUME: (self.servers + self.cinder_at_once) * self.data,
        }[way]

    def settings(self) -> dict[str, int]:
        """Options of Nova that differ from the defaults. One process has all computes here, and its threads."""
        return {
            "max_concurrent_builds": self.servers,
            "max_concurrent_snapshots": self.servers,
            "default_thread_pool_size": max(10, self.servers),
            "block_device_allocate_retries": 3600,
            "block_device_allocate_retries_interval": 1,
        }

    def write(self, file: Path) -> None:
        """For another process, which reads it."""
        file.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(file: Path) -> Plan:
        """What ``write`` wrote."""
        return Plan(**json.loads(file.read_text()))


def base_figures(plan: Plan) -> dict[str, Any]:
    """What the figures are about."""
    return {
        "servers": plan.servers, "computes": plan.computes, "image_size_bytes": plan.size * MIB,
        "data_bytes": plan.data * MIB, "image_format": "qcow2", "settings": plan.settings(),
        "cinder_at_once": plan.cinder_at_once, "boot_set_mib": BOOT_SET_MIB,
    }  # fmt: skip
