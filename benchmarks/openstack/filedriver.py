"""Cinder's NFS driver, as a process that makes a volume of an image for each line that it reads.

    python -m benchmarks.openstack.filedriver FOLDER IMAGE BYTES AT-ONCE

IMAGE is a qcow2 file that stands for Glance's, BYTES the size of the disk in it. A line is a JSON object with ``id``
and ``size`` (in GiB) of a volume; the answer, in the order in which they end, has ``id`` and ``path`` or ``error``, and
the bytes ``sent`` from Glance so far. It ends with its input.

Driver and image code are Cinder's. The share is a folder of this machine, so nothing is mounted; and there is no
database: what is kept there of a volume is in this process alone.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import eventlet

eventlet.monkey_patch()  # as Cinder's own program does, before anything else is imported

from cinder import context, coordination, objects, privsep  # noqa: E402
from cinder.image import image_utils  # noqa: E402
from cinder.volume import configuration  # noqa: E402
from cinder.volume.drivers import nfs  # noqa: E402
from eventlet import tpool  # noqa: E402
from oslo_config import cfg  # noqa: E402

from benchmarks.openstack.imagefile import ImageFile, metadata  # noqa: E402

SHARE = "127.0.0.1:/volumes"
CONF = cfg.CONF


class LocalNfs(nfs.NfsDriver):  # type: ignore[misc]
    """The driver, whose share is a folder here."""

    def _ensure_share_mounted(self, nfs_share: str) -> None:
        Path(self._get_mount_point_for_share(nfs_share)).mkdir(parents=True, exist_ok=True)


class Glance(image_utils.glance.GlanceImageService):  # type: ignore[misc]
    """The image service that asks for the data of one file."""

    def __init__(self, client: ImageFile, size: int) -> None:
        super().__init__(client)
        self._size = size

    def show(self, _context: Any, image_id: str) -> dict[str, Any]:
        """What is known of the image."""
        return metadata(image_id, self._client.file, self._size)


def configured(folder: Path) -> Any:
    """Cinder's options, and the driver's section of them."""
    objects.register_all()
    shares = folder / "shares"
    shares.write_text(SHARE + "\n")
    CONF([], project="cinder", default_config_files=[])
    CONF.set_override("state_path", str(folder))
    CONF.set_override("image_conversion_dir", str(folder / "conversion"))
    CONF.set_override("lock_path", str(folder / "locks"), group="oslo_concurrency")
    options = configuration.Configuration(nfs.nfs_opts, config_group="nfs")
    options.append_config_values(nfs.remotefs.nas_opts)
    for name, value in (
        ("nfs_shares_config", str(shares)),
        ("nfs_mount_point_base", str(folder / "mnt")),
        ("nas_secure_file_operations", "true"),  # as the user that Cinder runs as, and not through sudo
        ("nas_secure_file_permissions", "true"),
    ):
        CONF.set_override(name, value, group="nfs")
    return options


def started(folder: Path, root: Any) -> LocalNfs:
    """The driver, set up."""
    coordination.COORDINATOR.start()
    privsep.sys_admin_pctxt.set_client_mode(False)  # this is root already: no helper
    driver = LocalNfs(configuration=configured(folder), is_vol_db_empty=True)
    # It asks whether mount.nfs is installed, through sudo, which the rest of it does not need.
    driver._execute = _executed
    driver.do_setup(root)
    driver.check_for_setup_error()
    return driver


def _executed(*words: str, **how: Any) -> Any:
    from cinder import utils

    return ("", "") if words == ("mount.nfs",) else utils.execute(*words, **how)


def volume_of(root: Any, volume_id: str, size: int) -> Any:
    """A volume as the manager would have loaded it."""

    class Unsaved(objects.Volume):  # type: ignore[misc]
        def save(self) -> None:
            self.obj_reset_changes()

    return Unsaved(
        root, id=volume_id, name_id=None, size=size, status="creating", encryption_key_id=None, admin_metadata={},
        metadata={}, host="cinder@nfs#nfs", display_name="", project_id="project",
    )  # fmt: skip


def make(driver: LocalNfs, images: Glance, asked: dict[str, Any]) -> dict[str, Any]:
    """One volume, as the flow that creates volumes has the driver make it when it can clone nothing."""
    root = context.get_admin_context()
    volume = volume_of(root, asked["id"], asked["size"])
    try:
        volume.update(driver.create_volume(volume))
        driver.copy_image_to_volume(root, volume, images, "image")
    except Exception as error:  # noqa: BLE001  Cinder says so, too, and goes on
        return {"id": asked["id"], "error": f"{type(error).__name__}: {error}"}
    return {"id": asked["id"], "path": driver.local_path(volume)}


def main() -> None:
    """Serve until there are no more lines."""
    folder, file, size, at_once = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints something
    client = ImageFile(file)
    driver = started(folder, context.get_admin_context())
    pool = eventlet.GreenPool(at_once)

    def answer(asked: dict[str, Any]) -> None:
        images = Glance(client, size)  # each request has one of its own in Cinder: it keeps who has fetched what
        answers.write(json.dumps({**make(driver, images, asked), "sent": client.sent}) + "\n")
        answers.flush()

    answers.write("ready\n")
    answers.flush()
    while line := tpool.execute(sys.stdin.readline):
        pool.spawn(answer, json.loads(line))
    pool.waitall()


if __name__ == "__main__":
    main()
