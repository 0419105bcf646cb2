"""An image of which only a part is data, in runs that lie all over it, and reads by which any disk of it is checked."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.errors import WrongBytes
from benchmarks.figures import MIB
from benchmarks.processes import tool
from lab.tools import run

RUN_MIB = 16
"""MiB of data without a hole."""


@dataclass(frozen=True)
class SpreadImage:
    """Sizes in MiB; ``data`` is a multiple of RUN_MIB and at most ``size``."""

    size: int
    data: int

    def data_mibs(self) -> list[int]:
        """The numbers of the MiB that are data."""
        runs = self.data // RUN_MIB
        return [run * self.size // runs + number for run in range(runs) for number in range(RUN_MIB)]

    def holes(self) -> list[int]:
        """The numbers of the MiB that are not."""
        return sorted(set(range(self.size)) - set(self.data_mibs()))

    @staticmethod
    def byte(mib: int) -> int:
        """What a MiB of data is full of: no zeros, and not what its neighbours are full of."""
        return 1 + mib * 37 % 251

    def write(self, file: Path) -> None:
        """Make the image, as qcow2: a copy of such a file has no more bytes than there are data."""
        raw = file.with_suffix(".raw")
        try:
            with raw.open("wb") as target:
                os.truncate(target.fileno(), self.size * MIB)
                for mib in self.data_mibs():
                    os.pwrite(target.fileno(), bytes([self.byte(mib)]) * MIB, mib * MIB)
            run([tool("qemu-img"), "convert", "-f", "raw", "-O", "qcow2", raw, file])
        finally:
            raw.unlink(missing_ok=True)

    def boot_set(self, total: int) -> list[int]:
        """``total`` MiB of data (all, if there is less), spread over the image: what a VM reads while it boots."""
        data = self.data_mibs()
        return [data[number * len(data) // total] for number in range(total)] if total < len(data) else data

    def reads(self, total: int) -> list[str]:
        """qemu-io's commands that read a boot set and some holes, and fail if anything else is there."""
        holes = self.holes()
        zeros = sorted({holes[0], holes[len(holes) // 2], holes[-1]}) if holes else []
        return [
            *(f"read -P {self.byte(mib)} {mib}M 1M" for mib in self.boot_set(total)),
            *(f"read -P 0 {mib}M 1M" for mib in zeros),
        ]


def check_disk(disk: Path, reads: list[str], disk_format: str = "qcow2") -> None:
    """Do reads as a VM's QEMU would. Raises WrongBytes."""
    argv = [tool("qemu-io"), "-r", "-f", disk_format, *(word for read in reads for word in ("-c", read)), str(disk)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if done.returncode != 0 or "failed" in said:
        why = next((line for line in said.splitlines() if "failed" in line), f"exit code {done.returncode}")
        raise WrongBytes(f"{disk} does not hold what the image does: {why}")
