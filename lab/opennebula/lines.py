"""The lines that OpenNebula writes into a transfer file for each action, in its order."""

from __future__ import annotations

from collections.abc import Iterator

from lab.opennebula.pool import Disk, Vm


class Lines:
    """Lines for the VMs of one front end, called ``name``; system datastores lie below ``datastores``."""

    def __init__(self, name: str, datastores: str) -> None:
        self._name = name
        self._datastores = datastores

    def folder(self, vm: Vm, stay: int = -1) -> str:
        """The folder of a VM in the system datastore where it is; ``stay`` -2: where it was before."""
        return f"{self._datastores}/{vm.history[stay].datastore}/{vm.number}"

    def prolog(self, vm: Vm) -> Iterator[str]:
        """All disks, and kernel and initial RAM disk if they are images."""
        for disk in vm.disks:
            yield from self.prolog_disk(vm, disk)
        for part in ("KERNEL", "INITRD"):
            source, store, tm = (vm.attributes.get(f"{part}_DS_{name}", "") for name in ("SOURCE", "DSID", "TM"))
            if source and store and tm:
                there = f"{vm.here.host}:{self.folder(vm)}/{part.lower()}"
                yield f"CLONE {tm} {self._name}:{source} {there} {vm.number} {store}"

    def prolog_disk(self, vm: Vm, disk: Disk) -> Iterator[str]:
        """One disk: also for one that is attached."""
        there, end = self._disk(vm.here.host, vm, disk), f"{vm.number} {vm.here.datastore}"
        kind = disk.type.upper()
        if kind == "SWAP":
            yield f"MKSWAP {vm.here.tm_mad} {disk.size} {there} {end}"
        elif kind == "FS":
            yield f"MKIMAGE {vm.here.tm_mad} {disk.size} {disk.format} {there} {end}"
        else:
            verb = "CLONE" if disk.clone else "LN"
            source = disk.source if ":" in disk.source else f"{self._name}:{disk.source}"
            yield f"{verb}{suffix(disk)} {disk.tm_mad} {source} {there} {vm.number} {disk.datastore}"

    def epilog(self, vm: Vm, *, local: bool = False) -> Iterator[str]:
        """The end of a VM; ``local``: of one that is stopped or undeployed."""
        host = self._name if local else vm.here.host
        for disk in vm.disks:
            yield from self.epilog_disk(vm, disk, host)
        yield f"DELETE {vm.here.tm_mad} {host}:{self.folder(vm)} {vm.number} {vm.here.datastore}"

    def epilog_disk(self, vm: Vm, disk: Disk, host: str | None = None) -> Iterator[str]:
        """The end of one disk: also of one that is detached."""
        here = self._disk(host or vm.here.host, vm, disk)
        if disk.save:
            yield f"MVDS{suffix(disk)} {disk.tm_mad} {here} {disk.source} {vm.number} {disk.datastore}"
        else:
            tm, store = self._manager(vm, disk)
            yield f"DELETE{suffix(disk)} {tm} {here} {vm.number} {store}"

    def delete(self, vm: Vm, *, local: bool = False, stay: int = -1) -> Iterator[str]:
        """Everything of a VM is deleted, persistent disks without being saved; ``stay`` -2: where it was before."""
        place = vm.history[stay]
        host, after = self._name if local else place.host, Suffix()
        for disk in vm.disks:
            tm, store = self._manager(vm, disk, stay)
            yield f"DELETE{after.of(disk)} {tm} {self._disk(host, vm, disk, stay)} {vm.number} {store}"
        yield f"DELETE {place.tm_mad} {host}:{self.folder(vm, stay)} {vm.number} {place.datastore}"

    def stop(self, vm: Vm) -> Iterator[str]:
        """From the host to the front end."""
        yield from self._move(vm, (vm.here.host, -1), (self._name, -1))

    def resume(self, vm: Vm) -> Iterator[str]:
        """From the front end to the host where it is now."""
        yield from self._move(vm, (self._name, -2), (vm.here.host, -1))

    def migrate(self, vm: Vm) -> Iterator[str]:
        """From the host and system datastore where it was to those where it is now."""
        yield from self._move(vm, (vm.before.host, -2), (vm.here.host, -1))

    def _move(self, vm: Vm, source: tuple[str, int], target: tuple[str, int]) -> Iterator[str]:
        after = Suffix()
        for disk in vm.disks:
            tm, store = self._manager(vm, disk)
            ends = f"{self._disk(source[0], vm, disk, source[1])} {self._disk(target[0], vm, disk, target[1])}"
            yield f"MV{after.of(disk)} {tm} {ends} {vm.number} {store}"
        ends = f"{source[0]}:{self.folder(vm, source[1])} {target[0]}:{self.folder(vm, target[1])}"
        yield f"MV {vm.here.tm_mad} {ends} {vm.number} {vm.here.datastore}"

    def live(self, vm: Vm, phase: str) -> str:
        """A live migration: ``phase`` is PRE, POST or FAIL."""
        hosts = f"{vm.before.host} {vm.here.host}"
        return f"{phase}MIGRATE {vm.here.tm_mad} {hosts} {self.folder(vm)} {vm.number} {vm.here.datastore}"

    def snapshot(self, vm: Vm, disk: Disk, verb: str, number: int) -> str:
        """``verb``: SNAP_CREATE, SNAP_CREATE_LIVE, SNAP_REVERT or SNAP_DELETE."""
        here = self._disk(vm.here.host, vm, disk)
        return f"{verb}{suffix(disk)} {disk.tm_mad} {here} {number} {vm.number} {disk.datastore}"

    def resize(self, vm: Vm, disk: Disk, size: int) -> str:
        """To a size in MiB."""
        tm, store = self._manager(vm, disk)
        return f"RESIZE{suffix(disk)} {tm} {self._disk(vm.here.host, vm, disk)} {size} {vm.number} {store}"

    def save_as(self, vm: Vm, disk: Disk, source: str, snapshot: int, *, local: bool = False) -> str:
        """Into a new image's source; ``snapshot`` -1: what the disk has now."""
        here = self._disk(self._name if local else vm.here.host, vm, disk)
        return f"CPDS{suffix(disk)} {disk.tm_mad} {here} {source} {snapshot} {vm.number} {disk.datastore}"

    def backup(self, vm: Vm, disks: list[int], job: int, phase: str) -> str:
        """``phase``: PRE or POST; ``job`` -1: none."""
        live = "_LIVE" if vm.lcm.name == "BACKUP" else ""
        names = f"{':'.join(map(str, disks))} {vm.deploy_id} {'-' if job == -1 else job}"
        here = f"{vm.here.host}:{self.folder(vm)}"
        return f"{phase}BACKUP{live} {vm.here.tm_mad} {here} {names} {vm.number} {vm.here.datastore}"

    def restore(self, vm: Vm, image: int, increment: int, disk: int) -> str:
        """From a backup; ``increment`` -1: the last one, ``disk`` -1: all."""
        return f"RESTORE {vm.here.tm_mad} {vm.here.host}:{self.folder(vm)} {vm.number} {image} {increment} {disk} "

    def context(self, vm: Vm, file: str, disk_id: int) -> str:
        """The VM's context as a disk."""
        there = f"{vm.here.host}:{self.folder(vm)}/disk.{disk_id}"
        return f"CONTEXT {vm.here.tm_mad} {file} {there} {vm.number} {vm.here.datastore}"

    def _disk(self, host: str, vm: Vm, disk: Disk, stay: int = -1) -> str:
        return f"{host}:{self.folder(vm, stay)}/disk.{disk.disk_id}"

    def _manager(self, vm: Vm, disk: Disk, stay: int = -1) -> tuple[str, int]:
        place = vm.history[stay]
        return (place.tm_mad, place.datastore) if disk.volatile else (disk.tm_mad, disk.datastore)


class Suffix:
    """The mode of transfer as OpenNebula appends it in one file: a disk without one has that of the disk before."""

    def __init__(self) -> None:
        self._last = ""

    def of(self, disk: Disk) -> str:
        """What is appended for the next disk."""
        self._last = suffix(disk) or self._last
        return self._last


def suffix(disk: Disk) -> str:
    """The mode of transfer of a disk."""
    return f".{disk.tm_mad_system}" if disk.tm_mad_system else ""
