"""Models of OpenNebula's VMs, images and datastores, as far as storage drivers see them, and their XML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path


class State(IntEnum):
    """A VM's state."""

    PENDING = 1
    ACTIVE = 3
    STOPPED = 4
    DONE = 6
    POWEROFF = 8
    UNDEPLOYED = 9


class Lcm(IntEnum):
    """What is done with an active VM."""

    INIT = 0
    PROLOG = 1
    BOOT = 2
    RUNNING = 3
    MIGRATE = 4
    PROLOG_MIGRATE = 8
    PROLOG_RESUME = 9
    EPILOG_STOP = 10
    EPILOG = 11
    CLEANUP_RESUBMIT = 15
    UNKNOWN = 16
    HOTPLUG = 17
    CLEANUP_DELETE = 23
    HOTPLUG_SAVEAS = 26
    HOTPLUG_SAVEAS_POWEROFF = 27
    EPILOG_UNDEPLOY = 30
    PROLOG_UNDEPLOY = 31
    HOTPLUG_PROLOG_POWEROFF = 33
    HOTPLUG_EPILOG_POWEROFF = 34
    BOOT_FAILURE = 36
    PROLOG_MIGRATE_FAILURE = 38
    PROLOG_FAILURE = 39
    EPILOG_FAILURE = 40
    EPILOG_STOP_FAILURE = 41
    EPILOG_UNDEPLOY_FAILURE = 42
    PROLOG_MIGRATE_POWEROFF = 43
    PROLOG_MIGRATE_POWEROFF_FAILURE = 44
    PROLOG_RESUME_FAILURE = 49
    PROLOG_UNDEPLOY_FAILURE = 50
    DISK_SNAPSHOT_POWEROFF = 51
    DISK_SNAPSHOT_REVERT_POWEROFF = 52
    DISK_SNAPSHOT_DELETE_POWEROFF = 53
    DISK_SNAPSHOT = 57
    DISK_SNAPSHOT_DELETE = 59
    PROLOG_MIGRATE_UNKNOWN = 60
    DISK_RESIZE = 62
    DISK_RESIZE_POWEROFF = 63
    DISK_RESIZE_UNDEPLOYED = 64
    HOTPLUG_SAVEAS_UNDEPLOYED = 67
    HOTPLUG_SAVEAS_STOPPED = 68
    BACKUP = 69
    BACKUP_POWEROFF = 70
    RESTORE = 71


@dataclass
class Datastore:
    """A datastore; ``base`` is its folder on all hosts."""

    number: int
    tm_mad: str
    base: Path
    ds_mad: str = ""
    system: bool = False
    attributes: dict[str, str] = field(default_factory=dict)

    def xml(self) -> str:
        """As ``onedatastore show -x`` prints it."""
        return element("DATASTORE", self._content() + element("TEMPLATE", attributes(self._template())))

    def _content(self) -> str:
        clusters = element("CLUSTERS", element("ID", "0"))
        return clusters + values(
            {
                "ID": self.number,
                "NAME": f"datastore-{self.number}",
                "DS_MAD": self.ds_mad or "-",
                "TM_MAD": self.tm_mad,
                "BASE_PATH": self.base,
                "TYPE": 1 if self.system else 0,
                "DISK_TYPE": 1 if self.attributes.get("DISK_TYPE") == "BLOCK" else 0,
                "STATE": 0,
                "TOTAL_MB": 0,
                "FREE_MB": 0,
                "USED_MB": 0,
            }
        )

    def _template(self) -> dict[str, str]:
        kind = {"TYPE": "SYSTEM_DS"} if self.system else {"DS_MAD": self.ds_mad, "TYPE": "IMAGE_DS"}
        return {"TM_MAD": self.tm_mad} | kind | self.attributes


@dataclass
class Image:
    """An image; sizes in MiB."""

    number: int
    datastore: int
    path: str = ""
    source: str = ""
    size: int = 0
    format: str = ""
    persistent: bool = False
    name: str = ""
    attributes: dict[str, str] = field(default_factory=dict)
    elements: dict[str, str] = field(default_factory=dict)
    """More elements beside the template: TARGET_SNAPSHOT and the like."""
    vms: list[int] = field(default_factory=list)
    """The VMs that use it."""

    def xml(self) -> str:
        """As ``oneimage show -x`` prints it, and as it stands in a datastore's request."""
        head = {
            "ID": self.number,
            "NAME": self.name or f"image-{self.number}",
            "TYPE": 0,
            "PERSISTENT": int(self.persistent),
            "SOURCE": self.source,
            "PATH": self.path,
            "FORMAT": self.format,
            "FS": "",
            "SIZE": self.size,
            "STATE": 4,
            "DATASTORE_ID": self.datastore,
        }
        vms = element("VMS", "".join(element("ID", str(number)) for number in self.vms))
        return element("IMAGE", values(head | self.elements) + vms + element("TEMPLATE", attributes(self.attributes)))


@dataclass
class Disk:
    """A VM's disk; sizes in MiB."""

    disk_id: int
    source: str = ""
    size: int = 0
    original_size: int = 0
    tm_mad: str = ""
    datastore: int = -1
    image: int = -1
    clone: bool = True
    """False: the image is persistent."""
    type: str = "FILE"
    """FILE, BLOCK; ``fs`` and ``swap`` are volatile."""
    format: str = "raw"
    tm_mad_system: str = ""
    target: str = ""
    attributes: dict[str, str] = field(default_factory=dict)
    snapshots: list[int] = field(default_factory=list)
    marks: set[str] = field(default_factory=set)
    """Attributes that are YES while an action is under way: ATTACH, RESIZE, DISK_SNAPSHOT_ACTIVE."""

    @property
    def volatile(self) -> bool:
        """Whether it is of no image."""
        return self.type.upper() in ("FS", "SWAP")

    @property
    def save(self) -> bool:
        """Whether it goes back to the image at the end."""
        return not self.clone and not self.volatile

    def xml(self) -> str:
        """Its part of the VM's template."""
        own = {
            "DISK_ID": self.disk_id,
            "SIZE": self.size,
            "TYPE": self.type,
            "FORMAT": self.format,
            "TARGET": self.target or f"vd{chr(ord('a') + self.disk_id)}",
        }
        of_image = {
            "SOURCE": self.source,
            "ORIGINAL_SIZE": self.original_size or self.size,
            "TM_MAD": self.tm_mad,
            "DATASTORE_ID": self.datastore,
            "IMAGE_ID": self.image,
            "CLONE": "YES" if self.clone else "NO",
            "SAVE": "YES" if self.save else "NO",
            "TM_MAD_SYSTEM": self.tm_mad_system,
        }
        given = own if self.volatile else own | of_image
        texts = {name: str(value) for name, value in given.items() if value != ""}
        return element("DISK", attributes(texts | self.attributes | dict.fromkeys(sorted(self.marks), "YES")))

    def snapshots_xml(self) -> str:
        """The list of its snapshots."""
        if not self.snapshots:
            return ""
        inside = "".join(element("SNAPSHOT", values({"ID": number, "SIZE": self.size})) for number in self.snapshots)
        return element("SNAPSHOTS", values({"DISK_ID": self.disk_id}) + inside)


@dataclass
class History:
    """One stay of a VM on a host."""

    host: str
    datastore: int
    tm_mad: str
    action: int = 0

    def xml(self, vm: int, number: int) -> str:
        """Its part of the VM."""
        content = {
            "OID": vm,
            "SEQ": number,
            "HOSTNAME": self.host,
            "VM_MAD": "kvm",
            "TM_MAD": self.tm_mad,
            "DS_ID": self.datastore,
            "ACTION": self.action,
        }
        return element("HISTORY", values(content))


@dataclass
class Vm:
    """A VM."""

    number: int
    disks: list[Disk]
    history: list[History] = field(default_factory=list)
    state: State = State.PENDING
    lcm: Lcm = Lcm.INIT
    deploy_id: str = ""
    name: str = ""
    attributes: dict[str, str] = field(default_factory=dict)
    """More of the template."""
    user: dict[str, str] = field(default_factory=dict)
    """The user's template."""
    context: str = ""
    """A file on the front end that becomes one disk more; none: no such disk."""

    @property
    def here(self) -> History:
        """Where it is, or was last."""
        return self.history[-1]

    @property
    def before(self) -> History:
        """Where it was before."""
        return self.history[-2]

    def disk(self, disk_id: int) -> Disk:
        """A disk. Raises KeyError."""
        for disk in self.disks:
            if disk.disk_id == disk_id:
                return disk
        raise KeyError(disk_id)

    def xml(self, more: str = "") -> str:
        """As ``onevm show -x`` prints it; ``more`` elements at its end."""
        head = {
            "ID": self.number,
            "NAME": self.name or f"vm-{self.number}",
            "LAST_POLL": 0,
            "STATE": int(self.state),
            "LCM_STATE": int(self.lcm),
            "DEPLOY_ID": self.deploy_id,
        }
        disks = "".join(disk.xml() for disk in self.disks)
        template = element("TEMPLATE", disks + attributes(self.attributes | {"VMID": str(self.number)}))
        history = "".join(stay.xml(self.number, place) for place, stay in enumerate(self.history))
        snapshots = "".join(disk.snapshots_xml() for disk in self.disks)
        user = element("USER_TEMPLATE", attributes(self.user))
        return element("VM", values(head) + template + user + element("HISTORY_RECORDS", history) + snapshots + more)


def element(name: str, content: str) -> str:
    """An XML element around what is XML already."""
    return f"<{name}>{content}</{name}>"


def values(content: Mapping[str, object]) -> str:
    """Elements with text."""
    return "".join(element(name, escaped(str(value))) for name, value in content.items())


def attributes(content: Mapping[str, str]) -> str:
    """Elements of a template: there texts stand in CDATA."""
    return "".join(element(name, cdata(value)) for name, value in content.items())


def cdata(text: str) -> str:
    """A CDATA section; the text's own end marks are split."""
    return f"<![CDATA[{text.replace(']]>', ']]]]><![CDATA[>')}]]>"


def escaped(text: str) -> str:
    """Text for XML."""
    for mark, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(mark, entity)
    return text


def request(datastore: Datastore, image: Image | None = None, more: Iterable[str] = ()) -> str:
    """DS_DRIVER_ACTION_DATA: what a datastore's script gets, in base64, on its standard input."""
    return element("DS_DRIVER_ACTION_DATA", (image.xml() if image else "") + datastore.xml() + "".join(more))
