"""What oned does with VMs and images: keeps their states, writes transfer files and lets the drivers carry them out."""

from __future__ import annotations

import base64
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

from lab.errors import LabError
from lab.opennebula.driver import Answer, Driver, run_script
from lab.opennebula.frontend import HERE, Frontend
from lab.opennebula.lines import Lines
from lab.opennebula.pool import Datastore, Disk, History, Image, Lcm, State, Vm, attributes, element, request, values
from lab.tools import run

log = logging.getLogger(__name__)


class Oned:
    """The pools of a front end, and the actions on them. Each action returns the driver's answer; the VM has its state.

    A failed action leaves the VM in the state that users find it in, from where ``recover_delete`` and others go on.
    """

    def __init__(self, frontend: Frontend, driver: Driver) -> None:
        self.frontend = frontend
        self.driver = driver
        self.lines = Lines(frontend.name, str(frontend.datastores()))
        self.vms: dict[int, Vm] = {}
        self.images: dict[int, Image] = {}
        self.stores: dict[int, Datastore] = {}
        self._last: dict[int, tuple[Path, Callable[[Vm], None]]] = {}
        self._show("onevm", lambda number: self.vms[number].xml())
        self._show("oneimage", lambda number: self.images[number].xml())
        self._show("onedatastore", lambda number: self.stores[number].xml())
        self._show("onehost", self._host)

    def _show(self, program: str, xml: Callable[[int], str]) -> None:
        def answer(words: Sequence[str]) -> str:
            options = [word for word in words if word.startswith("-")]
            given = [word for word in words if not word.startswith("-")]
            if program == "onehost" and given == ["list"]:
                return element("HOST_POOL", "".join(xml(number) for number in range(len(self.frontend.hosts)))) + "\n"
            if given[:1] != ["show"] or not {"-x", "--xml"} & set(options):
                raise ValueError(f"{program} cannot {words}")
            return xml(int(given[1])) + "\n"

        self.frontend.exchange.show(program, answer)

    def _host(self, number: int) -> str:
        name = list(self.frontend.hosts)[number]
        content = values({"ID": number, "NAME": name, "STATE": 2, "CLUSTER_ID": 0})
        return element("HOST", content + element("TEMPLATE", attributes({"VIRTMAN": "YES"})))

    def system_datastore(self, number: int, tm_mad: str = "ssh") -> Datastore:
        """A new system datastore."""
        return self._store(Datastore(number, tm_mad, self.frontend.datastores() / str(number), system=True))

    def image_datastore(self, number: int, tm_mad: str, ds_mad: str, **attributes: str) -> Datastore:
        """A new datastore of images."""
        base = self.frontend.datastores() / str(number)
        return self._store(Datastore(number, tm_mad, base, ds_mad, attributes=attributes))

    def _store(self, store: Datastore) -> Datastore:
        # Only the front end has folders from the start: hosts get theirs by the first script that needs one.
        store.base.mkdir(parents=True, exist_ok=True)
        self.stores[store.number] = store
        return store

    # Images

    def add_image(self, image: Image) -> Answer:
        """Add an image from its path: its size first, then the copy."""
        store = self.stores[image.datastore]
        self.images[image.number] = image
        sized = self.driver.datastore("stat", request(store, image), image.number)
        if not sized.ok:
            return sized
        image.size = int(sized.info)
        answer = self.driver.datastore("cp", request(store, image), image.number)
        return self._has_source(image, answer)

    def make_image(self, image: Image) -> Answer:
        """A new image of its ``size``: empty, or, with format ``save_as``, for a disk to be saved to."""
        self.images[image.number] = image
        answer = self.driver.datastore("mkfs", request(self.stores[image.datastore], image), image.number)
        return self._has_source(image, answer)

    def clone_image(self, image: Image, other: Image) -> Answer:
        """A new image that is a copy of another."""
        image.path, image.size, image.format = other.source, other.size, other.format
        image.elements["CLONING_ID"] = str(other.number)
        self.images[image.number] = image
        answer = self.driver.datastore("clone", request(self.stores[image.datastore], image), image.number)
        return self._has_source(image, answer)

    def _has_source(self, image: Image, answer: Answer) -> Answer:
        if answer.ok:
            source, *rest = answer.info.split()
            image.source, image.format = source, rest[0] if rest else image.format
        return answer

    def remove_image(self, image: Image) -> Answer:
        """Delete an image, also by force while VMs use it; it is gone from the pool if that went well."""
        living = [vm for vm in self.vms.values() if vm.state is not State.DONE]
        image.vms = [vm.number for vm in living if any(disk.image == image.number for disk in vm.disks)]
        answer = self.image_action("rm", image)
        if answer.ok:
            del self.images[image.number]
        return answer

    def image_action(self, action: str, image: Image, snapshot: int | None = None) -> Answer:
        """``rm``, ``snap_delete``, ``snap_revert`` or ``snap_flatten``."""
        if snapshot is not None:
            image.elements["TARGET_SNAPSHOT"] = str(snapshot)
        answer = self.driver.datastore(action, request(self.stores[image.datastore], image), image.number)
        image.elements.pop("TARGET_SNAPSHOT", None)
        return answer

    def export_image(self, image: Image) -> ET.Element:
        """What a marketplace is told of an image: IMPORT_SOURCE, MD5, SIZE and FORMAT. Raises TransferFailed."""
        store = self.stores[image.datastore]
        script = self.frontend.remotes / "datastore" / store.ds_mad / "export"
        data = base64.b64encode(request(store, image).encode()).decode()
        answer = run_script(self.frontend, [script, str(image.number)], data).check()
        return ET.fromstring("\n".join([answer.info, *answer.stray]))

    def monitor(self, store: Datastore) -> dict[str, int]:
        """What the datastore's script says of its size, in MiB. Raises TransferFailed."""
        answer = self.driver.datastore("monitor", request(store), store.number).check()
        words = base64.b64decode(answer.info).decode().split()
        return {name: int(value) for name, _, value in (word.partition("=") for word in words) if value}

    # VMs from the first to the last

    def vm(self, disks: Sequence[Disk], number: int | None = None) -> Vm:
        """A VM that waits for a host."""
        vm = Vm(len(self.vms) if number is None else number, list(disks))
        self.vms[vm.number] = vm
        return vm

    def disk_of(self, image: Image, disk_id: int, system: str = "", **more: str) -> Disk:
        """A disk of an image, for a VM in a system datastore whose driver is ``system``."""
        store = self.stores[image.datastore]
        mode = system if system in store.attributes.get("TM_MAD_SYSTEM", "").split(",") else ""
        return Disk(
            disk_id,
            image.source,
            image.size,
            image.size,
            store.tm_mad,
            store.number,
            image.number,
            clone=not image.persistent,
            type=store.attributes.get("DISK_TYPE", "FILE"),
            format=image.format or "raw",
            tm_mad_system=mode,
            attributes=self._inherited(image, store) | more,
        )

    def _inherited(self, image: Image, store: Datastore) -> dict[str, str]:
        """The attributes that a disk has of its datastore and of its image, which comes first."""
        conf = self.frontend.oned_conf.read_text()
        found: dict[str, str] = {}
        for list_name, has in (("INHERIT_DATASTORE_ATTR", store.attributes), ("INHERIT_IMAGE_ATTR", image.attributes)):
            names = re.findall(rf'^{list_name}\s*=\s*"([^"]*)"', conf, re.MULTILINE)
            found |= {name: has[name] for name in names if has.get(name)}
        return found

    def deploy(self, vm: Vm, host: str, datastore: int) -> Answer:
        """To a host: a waiting VM, or one that was undeployed or stopped."""
        before = vm.state
        self._stay(vm, host, datastore)
        if before in (State.STOPPED, State.UNDEPLOYED):
            doing = Lcm.PROLOG_RESUME if before is State.STOPPED else Lcm.PROLOG_UNDEPLOY
            return self._do(vm, doing, "resume", self.lines.resume(vm), self._boot)
        answer = self._do(vm, Lcm.PROLOG, "prolog", self.lines.prolog(vm), self._boot)
        return self._context(vm) if answer.ok and vm.context else answer

    resume = deploy

    def _context(self, vm: Vm) -> Answer:
        """The hypervisor's driver has it made before it boots the VM."""
        number = max((disk.disk_id for disk in vm.disks), default=-1) + 1
        answer = self.driver.step(self.lines.context(vm, vm.context, number).split())
        if not answer.ok:
            vm.lcm = Lcm.BOOT_FAILURE
        return answer

    def _stay(self, vm: Vm, host: str, datastore: int) -> None:
        vm.history.append(History(host, datastore, self.stores[datastore].tm_mad))
        vm.state = State.ACTIVE

    def _boot(self, vm: Vm) -> None:
        # The hypervisor's driver lays the VM's and the datastore's XML beside the disks.
        folder = self.frontend.seen(vm.here.host, self.lines.folder(vm))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "vm.xml").write_text(vm.xml())
        (folder / "ds.xml").write_text(self.stores[vm.here.datastore].xml())
        vm.state, vm.lcm, vm.deploy_id = State.ACTIVE, Lcm.RUNNING, f"one-{vm.number}"

    def power_off(self, vm: Vm) -> None:
        """The hypervisor shuts it down; its disks stay."""
        vm.state, vm.lcm = State.POWEROFF, Lcm.INIT

    def power_on(self, vm: Vm) -> None:
        """It runs again."""
        self._boot(vm)

    def terminate(self, vm: Vm) -> Answer:
        """The end of a VM; persistent disks go back."""
        local = vm.state in (State.STOPPED, State.UNDEPLOYED)
        return self._do(vm, Lcm.EPILOG, "epilog", self.lines.epilog(vm, local=local), self._done)

    def _done(self, vm: Vm) -> None:
        vm.state, vm.lcm = State.DONE, Lcm.INIT

    def stop(self, vm: Vm) -> Answer:
        """To the front end, with its memory."""
        return self._do(vm, Lcm.EPILOG_STOP, "stop", self.lines.stop(vm), self._to(State.STOPPED))

    def undeploy(self, vm: Vm) -> Answer:
        """To the front end, shut down."""
        return self._do(vm, Lcm.EPILOG_UNDEPLOY, "stop", self.lines.stop(vm), self._to(State.UNDEPLOYED))

    def _to(self, state: State) -> Callable[[Vm], None]:
        def settle(vm: Vm) -> None:
            vm.state, vm.lcm = state, Lcm.INIT

        return settle

    def migrate(self, vm: Vm, host: str, datastore: int | None = None) -> Answer:
        """Cold, to another host or system datastore. A VM that runs is saved before, and runs after."""
        off = vm.state is State.POWEROFF
        doing = Lcm.PROLOG_MIGRATE_POWEROFF if off else Lcm.PROLOG_MIGRATE
        self._stay(vm, host, vm.here.datastore if datastore is None else datastore)
        return self._do(vm, doing, "migrate", self.lines.migrate(vm), self.power_off if off else self._boot)

    def live_migrate(self, vm: Vm, host: str, datastore: int | None = None) -> Answer:
        """While it runs. After a failure it is, for oned, where it was before."""
        self._stay(vm, host, vm.here.datastore if datastore is None else datastore)
        vm.lcm = Lcm.MIGRATE
        told = base64.b64encode(vm.xml().encode()).decode()
        answer = self._phase(vm, "PRE", told)
        if answer.ok:
            answer = self._hypervisor_migrates(vm)
        if answer.ok:
            self._phase(vm, "POST", told)
        else:
            self._phase(vm, "FAIL", told)
            # The stay that failed remains in the history; a new one follows, like the one before.
            vm.history.append(replace(vm.before))
        vm.lcm = Lcm.RUNNING
        return answer

    def _phase(self, vm: Vm, phase: str, told: str) -> Answer:
        return self.driver.step(self.lines.live(vm, phase).split(), told)

    def _hypervisor_migrates(self, vm: Vm) -> Answer:
        words = [self.lines.folder(vm, -2), self.lines.folder(vm), vm.here.host]
        program = [*self.frontend.on(vm.before.host), "/bin/sh", str(HERE / "programs" / "hypervisor-migrate")]
        try:
            run([*program, *words, str(self.frontend.folder / "bin" / "ssh")])
        except LabError as error:
            return Answer(False, str(error).splitlines()[-1])
        return Answer(True)

    # What is done with disks

    def snapshot_create(self, vm: Vm, disk_id: int, number: int) -> Answer:
        """A snapshot of a disk; of a VM that runs, live."""
        live = vm.lcm is Lcm.RUNNING
        doing = Lcm.DISK_SNAPSHOT if live else Lcm.DISK_SNAPSHOT_POWEROFF
        answer = self._snapshot(vm, disk_id, "SNAP_CREATE_LIVE" if live else "SNAP_CREATE", number, doing)
        if answer.ok:
            vm.disk(disk_id).snapshots.append(number)
        return answer

    def snapshot_revert(self, vm: Vm, disk_id: int, number: int) -> Answer:
        """Back to a snapshot; the VM is off."""
        return self._snapshot(vm, disk_id, "SNAP_REVERT", number, Lcm.DISK_SNAPSHOT_REVERT_POWEROFF)

    def snapshot_delete(self, vm: Vm, disk_id: int, number: int) -> Answer:
        """A snapshot is deleted."""
        doing = Lcm.DISK_SNAPSHOT_DELETE if vm.lcm is Lcm.RUNNING else Lcm.DISK_SNAPSHOT_DELETE_POWEROFF
        answer = self._snapshot(vm, disk_id, "SNAP_DELETE", number, doing)
        if answer.ok:
            vm.disk(disk_id).snapshots.remove(number)
        return answer

    def _snapshot(self, vm: Vm, disk_id: int, verb: str, number: int, doing: Lcm) -> Answer:
        disk = vm.disk(disk_id)
        lines = [self.lines.snapshot(vm, disk, verb, number)]
        return self._beside(vm, doing, "disk_snapshot", lines, disk, "DISK_SNAPSHOT_ACTIVE")

    def resize(self, vm: Vm, disk_id: int, size: int) -> Answer:
        """A disk to a size in MiB; the new one stands in the VM's XML from the start, the old one after a failure."""
        disk = vm.disk(disk_id)
        before, disk.size = disk.size, size
        doing = Lcm.DISK_RESIZE if vm.lcm is Lcm.RUNNING else Lcm.DISK_RESIZE_POWEROFF
        if vm.state is State.UNDEPLOYED:
            doing = Lcm.DISK_RESIZE_UNDEPLOYED
        answer = self._beside(vm, doing, "disk_resize", [self.lines.resize(vm, disk, size)], disk, "RESIZE")
        if not answer.ok:
            disk.size = before
        return answer

    def save_as(self, vm: Vm, disk_id: int, image: Image, snapshot: int = -1) -> Answer:
        """A disk, or a snapshot of it, becomes a new image."""
        disk = vm.disk(disk_id)
        image.size, image.format = disk.size, "save_as"
        image.attributes |= {"SAVED_IMAGE_ID": str(disk.image), "SAVED_DISK_ID": str(disk_id)}
        image.attributes |= {"SAVED_VM_ID": str(vm.number)}
        made = self.make_image(image)
        if not made.ok:
            return made
        doing = {
            State.ACTIVE: Lcm.HOTPLUG_SAVEAS,
            State.STOPPED: Lcm.HOTPLUG_SAVEAS_STOPPED,
            State.UNDEPLOYED: Lcm.HOTPLUG_SAVEAS_UNDEPLOYED,
        }.get(vm.state, Lcm.HOTPLUG_SAVEAS_POWEROFF)
        local = vm.state in (State.STOPPED, State.UNDEPLOYED)
        line = self.lines.save_as(vm, disk, image.source, snapshot, local=local)
        return self._beside(vm, doing, "disk_saveas", [line])

    def attach(self, vm: Vm, disk: Disk, *, hypervisor: bool = True) -> Answer:
        """One more disk; it is gone from the VM after a failure. ``hypervisor``: whether that can attach it."""
        vm.disks.append(disk)
        doing = Lcm.HOTPLUG if vm.lcm is Lcm.RUNNING else Lcm.HOTPLUG_PROLOG_POWEROFF
        answer = self._beside(vm, doing, "prolog_attach", self.lines.prolog_disk(vm, disk), disk, "ATTACH")
        if answer.ok and not hypervisor:
            self._beside(vm, doing, "epilog_detach", self.lines.epilog_disk(vm, disk), disk, "ATTACH")
            answer = Answer(False, "the hypervisor cannot attach the disk")
        if not answer.ok:
            vm.disks.remove(disk)
        return answer

    def detach(self, vm: Vm, disk_id: int) -> Answer:
        """One disk less."""
        disk = vm.disk(disk_id)
        doing = Lcm.HOTPLUG if vm.lcm is Lcm.RUNNING else Lcm.HOTPLUG_EPILOG_POWEROFF
        answer = self._beside(vm, doing, "epilog_detach", self.lines.epilog_disk(vm, disk), disk, "ATTACH")
        if answer.ok:
            vm.disks.remove(disk)
        return answer

    def backup(self, vm: Vm, disks: Sequence[int], upload: Callable[[], bool] = lambda: True) -> Answer:
        """What the system datastore's driver does before and after a backup; ``upload`` takes the place of the copy."""
        before = vm.lcm
        vm.lcm = Lcm.BACKUP if before is Lcm.RUNNING else Lcm.BACKUP_POWEROFF
        answer = self.driver.step(self.lines.backup(vm, list(disks), -1, "PRE").split(), vm.xml())
        if answer.ok and not upload():
            answer = Answer(False, "the backup could not be uploaded")
        result = "" if answer.ok else element("BACKUP_RESULT", "FAILURE")
        after = self.driver.step(self.lines.backup(vm, list(disks), -1, "POST").split(), vm.xml(result))
        vm.lcm = before
        return answer if not answer.ok else after

    def restore(self, vm: Vm, image: int, increment: int = -1, disk: int = -1) -> Answer:
        """From a backup, while the VM is off."""
        return self._beside(vm, Lcm.RESTORE, "restore", [self.lines.restore(vm, image, increment, disk)])

    # After failures

    def recover_retry(self, vm: Vm) -> Answer:
        """The action that failed once more: its transfer file is run again."""
        return self._run(vm, self._last[vm.number])

    def recover_failure(self, vm: Vm) -> None:
        """A move that failed is given up: for oned the VM is where it was before, and restored at once if it ran."""
        vm.history.append(replace(vm.before))
        (self._boot if vm.lcm is Lcm.PROLOG_MIGRATE_FAILURE else self.power_off)(vm)

    def recover_delete(self, vm: Vm) -> Answer:
        """All of the VM is deleted that oned knows of."""
        return self._delete(vm, Lcm.CLEANUP_DELETE, self._done)

    def recreate(self, vm: Vm, host: str, datastore: int) -> Answer:
        """Delete and deploy anew."""
        answer = self._delete(vm, Lcm.CLEANUP_RESUBMIT, self._to(State.PENDING))
        return self.deploy(vm, host, datastore) if answer.ok else answer

    def _delete(self, vm: Vm, doing: Lcm, then: Callable[[Vm], None]) -> Answer:
        lines = self._all_gone(vm)
        if vm.lcm is not Lcm.RUNNING and vm.state is not State.POWEROFF:
            return self._do(vm, doing, "delete", lines, then)
        # The hypervisor's driver does it where there may be a process: line by line, and no failure counts.
        vm.state, vm.lcm = State.ACTIVE, doing
        for line in lines:
            self.driver.step(line.split())
        then(vm)
        return Answer(True)

    def _all_gone(self, vm: Vm) -> list[str]:
        # After a resume that failed, what lies on the front end is not deleted: nor is it by oned.
        lines = list(self.lines.delete(vm, local=vm.state in (State.STOPPED, State.UNDEPLOYED)))
        if vm.lcm.name.startswith("PROLOG_MIGRATE"):
            lines += self.lines.delete(vm, stay=-2)
        return lines

    # How it is carried out

    def _do(self, vm: Vm, doing: Lcm, name: str, lines: Iterable[str], then: Callable[[Vm], None]) -> Answer:
        """One transfer that changes where the VM is; after a failure the VM waits for an operator."""
        vm.lcm = doing
        self._last[vm.number] = self._write(vm, name, lines), then
        return self._run(vm, self._last[vm.number])

    def _run(self, vm: Vm, what: tuple[Path, Callable[[Vm], None]]) -> Answer:
        file, then = what
        doing = vm.lcm
        if doing.name.endswith("_FAILURE"):
            doing = vm.lcm = Lcm[doing.name.removesuffix("_FAILURE")]
        answer = self.driver.transfer(file)
        if vm.lcm is not doing:
            return answer  # it was cancelled meanwhile: oned does not hear of it any more
        if answer.ok:
            then(vm)
        elif f"{doing.name}_FAILURE" in Lcm.__members__:
            vm.lcm = Lcm[f"{doing.name}_FAILURE"]
        return answer

    def _beside(
        self, vm: Vm, doing: Lcm, name: str, lines: Iterable[str], disk: Disk | None = None, mark: str = ""
    ) -> Answer:
        """One transfer that leaves the VM in the state in which it was, whether it fails or not."""
        before, state = vm.lcm, vm.state
        vm.lcm, vm.state = doing, State.ACTIVE
        if disk is not None:
            disk.marks.add(mark)
        answer = self.driver.transfer(self._write(vm, name, lines))
        if disk is not None:
            disk.marks.discard(mark)
        vm.lcm, vm.state = before, state
        return answer

    def _write(self, vm: Vm, name: str, lines: Iterable[str]) -> Path:
        folder = self.frontend.location / "var" / "vms" / str(vm.number)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"transfer.{len(vm.history) - 1}.{name}"
        file.write_text("".join(f"{line}\n" for line in lines))
        return file
