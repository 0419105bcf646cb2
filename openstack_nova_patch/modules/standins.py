"""Volumes that stand for snapshots of bases.

A snapshot of a base, as Cinder takes one of a volume, is a base as well: that is what Horizon offers with a count. No
host can attach a snapshot; so one volume is made of it, for all servers, and marked as a base. Who needs it finds it by
its metadata. If hosts make one at the same moment, all take the oldest; the others are deleted, at once or by who looks
after the oldest: Cinder refuses it while they are being made.
"""

from __future__ import annotations

import logging
from typing import Any

import nova.context
from nova import exception
from nova.virtman import names
from oslo_concurrency import lockutils

LOG = logging.getLogger(__name__)

SNAPSHOT = "virtman_snapshot"
"""The key in the metadata of such a volume which has the snapshot's ID."""

_UNUSABLE = ("error", "deleting", "error_deleting")


def is_of_base(cinder: Any, context: Any, snapshot: Any) -> bool:
    """Whether a snapshot, as nova.volume.cinder tells it, is one of a base."""
    try:
        return names.is_base(cinder.get(context, snapshot["volume_id"]))
    except exception.VolumeNotFound:
        return False


def volume_of(cinder: Any, context: Any, snapshot: Any, **more: Any) -> Any:
    """The volume that stands for a snapshot, which is made if there is none. ``more``: as ``create`` takes it."""
    with lockutils.lock(f"virtman-snapshot-{snapshot['id']}"):
        if (found := _oldest(cinder, snapshot)) is not None:
            return found
        metadata = {names.MARK: names.MARKED, SNAPSHOT: snapshot["id"]}
        name = f"base of {snapshot['display_name'] or snapshot['id']}"
        why = "VirtMan reads it for all servers that boot from the snapshot"
        made = cinder.create(context, snapshot["size"], name, why, snapshot=snapshot, metadata=metadata, **more)
        oldest = _oldest(cinder, snapshot) or made
        if oldest["id"] != made["id"]:
            LOG.info("another host has made a volume of snapshot %s, too", snapshot["id"])
            _delete(cinder, context, made["id"])
        return oldest


def _oldest(cinder: Any, snapshot: Any) -> Any:
    return next(iter(_by_age(cinder, snapshot["id"])), None)


def _by_age(cinder: Any, snapshot_id: str) -> list[Any]:
    """The volumes that stand for a snapshot.

    Anybody may write such metadata: what counts is that Cinder made the volume of the snapshot, and could.
    """
    wanted = {"all_tenants": True, "metadata": {SNAPSHOT: snapshot_id}}
    found = [
        volume
        for volume in cinder.get_all(nova.context.get_admin_context(), search_opts=wanted)
        if volume["snapshot_id"] == snapshot_id and volume["status"] not in _UNUSABLE
    ]
    return sorted(found, key=lambda volume: (str(volume["created_at"]), volume["id"]))


def delete_younger(cinder: Any, context: Any, volume: Any) -> None:
    """Delete what other hosts made for the same snapshot as this volume, and nobody uses."""
    if (snapshot := volume["volume_metadata"].get(SNAPSHOT)) is None:
        return
    oldest, *younger = _by_age(cinder, snapshot) or [volume]
    for one in younger:
        if oldest["id"] == volume["id"] and one["status"] == "available":
            _delete(cinder, context, one["id"])


def _delete(cinder: Any, context: Any, volume_id: str) -> None:
    """Delete a volume that is one too many: no server fails because it stays."""
    try:
        cinder.delete(context, volume_id)
    except exception.NovaException as error:
        LOG.warning("volume %s, which is one too many, stays for now: %s", volume_id, error)


def has_lost_its_snapshot(cinder: Any, context: Any, volume: Any) -> bool:
    """Whether the snapshot is gone that a volume stands for."""
    if (snapshot := volume["volume_metadata"].get(SNAPSHOT)) is None:
        return False
    try:
        cinder.get_snapshot(context, snapshot)
    except exception.SnapshotNotFound:
        return True
    return False
