"""A Cinder whose volumes are files of this machine, in place of nova.volume.cinder.API's calls over HTTP."""

from __future__ import annotations

import copy
import json
import threading
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fixtures
from nova import exception


def nobody_listens(_step: str) -> None:
    """Of what a call has come to."""


class Cinder(fixtures.Fixture):  # type: ignore[misc]
    """Volumes that are raw files, attached by os-brick's connector for local devices.

    ``kept``: a file that has the state, and has it again for the next one on it. ``step`` hears of each call that
    changes something, before it begins and when it has.
    """

    def __init__(self, test: Any, kept: Path | None = None, step: Callable[[str], None] = nobody_listens) -> None:
        super().__init__()
        self._test = test
        self._kept = kept
        self.step = step
        self._lock = threading.RLock()
        self.volumes: dict[str, dict[str, Any]] = {}
        self.snapshots: dict[str, dict[str, Any]] = {}
        self.attachments: dict[str, dict[str, Any]] = {}
        self.calls: list[tuple[str, str]] = []
        """Each call that changes something, with the ID of its volume or attachment."""
        self.refuse: dict[str, Exception] = {}
        """What the call of a name raises."""

    def _setUp(self) -> None:
        if self._kept is not None and self._kept.exists():
            self.volumes, self.snapshots, self.attachments = json.loads(self._kept.read_text())
        for name in (
            "get", "attachment_create", "attachment_get", "attachment_update", "attachment_complete",
            "attachment_delete", "begin_detaching", "roll_detaching", "delete", "get_all", "create", "get_snapshot",
        ):  # fmt: skip
            self._test.stub_out(f"nova.volume.cinder.API.{name}", self._counted(name))
        self._test.stub_out("nova.volume.cinder.cinderclient", lambda *_more, **_options: self._client())

    def _client(self) -> Any:
        """What nova.volume.cinder.API makes its calls by. Volumes are of another project than who calls: as Cinder
        does, it lists their attachments to an administrator who asks for all projects, and to no other one.
        """

        def listed(search_opts: dict[str, Any]) -> list[Any]:
            with self._lock:
                if "attachment_get_all" in self.refuse:
                    raise self.refuse["attachment_get_all"]
                wanted = {name: value for name, value in search_opts.items() if name != "all_tenants"}
                found = self.attachment_get_all(**wanted) if "all_tenants" in search_opts else []
                return [SimpleNamespace(to_dict=partial(copy.deepcopy, one)) for one in found]

        return SimpleNamespace(attachments=SimpleNamespace(list=listed))

    def _counted(self, name: str) -> Any:
        changes = not name.endswith(("get", "get_all", "get_snapshot"))

        def call(_api: Any, _context: Any, *args: Any, **more: Any) -> Any:
            if changes:
                self.step(f"before {name}")
            with self._lock:
                if changes:
                    self.calls.append((name, args[0]))
                if name in self.refuse:
                    raise self.refuse[name]
                answer = copy.deepcopy(getattr(self, name)(*args, **more))
                self.keep()
            if changes:
                self.step(f"after {name}")
            return answer

        return call

    def keep(self) -> None:
        """Write the state to its file, if there is one."""
        if self._kept is not None:
            new = self._kept.with_suffix(".new")
            new.write_text(json.dumps([self.volumes, self.snapshots, self.attachments]))
            new.rename(self._kept)

    def add(self, file: Path, *, base: bool = True, multiattach: bool = False) -> str:
        """A volume with a file's content, and its ID."""
        volume_id = str(uuid.uuid4())
        self.volumes[volume_id] = {
            "id": volume_id, "file": str(file), "display_name": file.name, "size": 1, "status": "available",
            "created_at": str(len(self.volumes)),
            "multiattach": multiattach, "availability_zone": "nova", "bootable": True, "attach_status": "detached",
            "volume_metadata": {"virtman_base": "true"} if base else {}, "volume_type_id": None,
            "volume_image_metadata": {"image_id": "155d900f-4e14-4e4c-a73d-069cbf4541e6"}, "encrypted": False,
            "snapshot_id": None,
        }  # fmt: skip
        return volume_id

    def add_snapshot(self, volume_id: str) -> str:
        """A snapshot of a volume, and its ID."""
        snapshot = str(uuid.uuid4())
        self.snapshots[snapshot] = {
            "id": snapshot, "volume_id": volume_id, "size": 1, "status": "available", "display_name": "a snapshot",
        }  # fmt: skip
        return snapshot

    def get_snapshot(self, snapshot_id: str) -> dict[str, Any]:
        if snapshot_id not in self.snapshots:
            raise exception.SnapshotNotFound(snapshot_id=snapshot_id)
        return self.snapshots[snapshot_id]

    def create(self, size: int, _name: str, _description: str, **more: Any) -> dict[str, Any]:
        """A volume with the content of a snapshot's."""
        made = self.add(Path(self.volumes[more["snapshot"]["volume_id"]]["file"]), base=False)
        self.volumes[made].update(volume_metadata=more["metadata"], size=size, snapshot_id=more["snapshot"]["id"])
        return self.volumes[made]

    def get(self, volume_id: str, microversion: str | None = None) -> dict[str, Any]:
        if volume_id not in self.volumes:
            raise exception.VolumeNotFound(volume_id=volume_id)
        return self.volumes[volume_id]

    def get_all(self, search_opts: dict[str, Any]) -> list[dict[str, Any]]:
        """All that have this metadata."""
        wanted = search_opts["metadata"]
        return [one for one in self.volumes.values() if wanted.items() <= one["volume_metadata"].items()]

    def attachment_create(
        self, volume_id: str, instance_id: str, connector: Any = None, mountpoint: str | None = None
    ) -> dict[str, Any]:
        volume = self.get(volume_id)
        if volume["status"] != "available" and not (volume["multiattach"] and volume["status"] == "in-use"):
            raise exception.InvalidInput(reason=f"volume {volume_id} is {volume['status']}, and not available")
        made: dict[str, Any] = {
            "id": str(uuid.uuid4()),
            "volume_id": volume_id,
            "instance": instance_id,
            "connection_info": {},
        }
        self.attachments[made["id"]] = made
        volume["status"] = "reserved"
        if connector is not None:
            self.attachment_update(made["id"], connector, mountpoint)
        return made

    def attachment_get(self, attachment_id: str) -> dict[str, Any]:
        if attachment_id not in self.attachments:
            raise exception.VolumeAttachmentNotFound(attachment_id=attachment_id)
        return self.attachments[attachment_id]

    def attachment_get_all(self, instance_id: str | None = None, volume_id: str | None = None) -> list[dict[str, Any]]:
        wanted = {key: value for key, value in (("instance", instance_id), ("volume_id", volume_id)) if value}
        return [one for one in self.attachments.values() if wanted.items() <= one.items()]

    def attachment_update(self, attachment_id: str, connector: Any, mountpoint: str | None = None) -> dict[str, Any]:
        attachment = self.attachment_get(attachment_id)
        volume = self.get(attachment["volume_id"])
        volume["status"] = "attaching"
        data = {"device_path": volume["file"]}
        attachment["connection_info"] = {"driver_volume_type": "local", "data": data}
        attachment["mode"] = connector.get("mode", "rw")
        return attachment

    def attachment_complete(self, attachment_id: str) -> None:
        self.get(self.attachment_get(attachment_id)["volume_id"])["status"] = "in-use"

    def attachment_delete(self, attachment_id: str) -> None:
        gone = self.attachments.pop(attachment_id, None)
        if gone is not None and not self.attachment_get_all(volume_id=gone["volume_id"]):
            self.volumes[gone["volume_id"]]["status"] = "available"

    def begin_detaching(self, volume_id: str) -> None:
        self.get(volume_id)["status"] = "detaching"

    def roll_detaching(self, volume_id: str) -> None:
        self.get(volume_id)["status"] = "in-use"

    def delete(self, volume_id: str) -> None:
        if self.get(volume_id)["status"] != "available":
            raise exception.InvalidInput(reason=f"volume {volume_id} is in use")
        del self.volumes[volume_id]
