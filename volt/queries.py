"""Questions to the database and small changes of it, each within a transaction of the caller."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Row, and_, delete, func, not_, or_, select, union, update
from sqlalchemy.orm import Session

from volt.errors import HostUnknown, ImageUnknown
from volt.models import HostState, Image, NodeReport, NodeState
from volt.store import BootSetRow, HostRow, ImageRow, departure_table, node_table

_NODES = select(ImageRow.name, ImageRow.withdrawn, node_table).join(node_table).order_by(ImageRow.id)


def locked_host(session: Session, name: str) -> HostRow:
    """A registered host. Raises HostUnknown."""
    row = session.get(HostRow, name, with_for_update={"key_share": True})
    if row is None:
        raise HostUnknown(f"host {name} is not registered")
    return row


def locked_image(session: Session, name: str) -> ImageRow | None:
    """The row of an image's name, also of one that is not published any more."""
    return session.scalar(select(ImageRow).where(ImageRow.name == name).with_for_update())


def published(session: Session, name: str, *, lock: bool = False) -> ImageRow:
    """A published image. Raises ImageUnknown."""
    query = select(ImageRow).where(ImageRow.name == name, ImageRow.published)
    image = session.scalar(query.with_for_update() if lock else query)
    if image is None:
        raise ImageUnknown(f"no image {name} is published")
    return image


def origins_of(session: Session, image: ImageRow) -> list[str]:
    """The origins of an image, the first one first."""
    n = node_table.c
    found = select(n.host).where(n.image_id == image.id, n.slot <= 0).order_by(n.slot.desc())
    return list(session.scalars(found))


def whole_images(session: Session) -> dict[str, list[str]]:
    """By host, the names of the images of which the host has all."""
    n = node_table.c
    query = select(n.host, ImageRow.name).join(ImageRow, ImageRow.id == n.image_id).where(ImageRow.published)
    found: dict[str, list[str]] = {}
    for host, image in session.execute(query.where(or_(n.whole, n.slot <= 0)).order_by(ImageRow.name)):
        found.setdefault(host, []).append(image)
    return found


def is_settled(session: Session, image: ImageRow) -> bool:
    """Whether all hosts of an image read from where Volt wants them to, except those that come back."""
    n = node_table.c
    moving = n.state.in_((NodeState.JOINING, NodeState.MOVING))
    return session.scalar(select(n.host).where(n.image_id == image.id, n.slot > 0, moving).limit(1)) is None


def images_of(session: Session, *hosts: str) -> list[ImageRow]:
    """The images in whose trees these hosts are, locked. A host may have left one while this waited for the lock."""
    theirs = select(node_table.c.image_id).where(node_table.c.host.in_(hosts))
    images = select(ImageRow).where(ImageRow.id.in_(theirs)).order_by(ImageRow.id)
    return list(session.scalars(images.with_for_update()))


def nodes_of(session: Session, host: str) -> dict[str, Row[Any]]:
    """A host's nodes by image, with ``withdrawn`` of the image, in the order in which images are locked."""
    return {row.name: row for row in session.execute(_NODES.where(node_table.c.host == host))}


def departures_of(session: Session, host: str, images: Collection[str] = ()) -> dict[str, Row[Any]]:
    """A host's departures by image: from the images that wait for the host, and from ``images``.

    Over the years there may be very many others. An image of ``images`` that the host never left has a row without a
    departure. ``published``: whether the image is.
    """
    here = and_(departure_table.c.image_id == ImageRow.id, departure_table.c.host == host)
    query = select(ImageRow.name, ImageRow.published, departure_table).outerjoin(departure_table, here)
    awaited = departure_table.c.awaited
    query = query.where(or_(awaited, ImageRow.name.in_(images)) if images else awaited)
    return {row.name: row for row in session.execute(query)}


def end_waiting(session: Session, departures: Mapping[str, Row[Any]], needed: Collection[str] = ()) -> None:
    """Only the ``needed`` ones of these images still wait for the host that left their trees."""
    for image, row in departures.items():
        if row.awaited and image not in needed:
            here = and_(departure_table.c.host == row.host, departure_table.c.image_id == row.image_id)
            session.execute(update(departure_table).where(here).values(awaited=False))


def note_report(session: Session, host: str, stored: Row[Any], report: NodeReport) -> None:
    """Store what a host reports about its reads."""
    news = report.model_dump(include={"fetched_bytes", "sent_bytes", "parent"})
    if any(getattr(stored, name) != value for name, value in news.items()):
        here = and_(node_table.c.image_id == stored.image_id, node_table.c.host == host)
        session.execute(update(node_table).where(here).values(**news))


def sent_bytes(session: Session, image: ImageRow) -> dict[str, int]:
    """By host in the image's tree, the bytes that others have read there."""
    query = select(node_table.c.host, node_table.c.sent_bytes).where(node_table.c.image_id == image.id)
    return {row.host: row.sent_bytes for row in session.execute(query)}


def describe(session: Session, images: Sequence[ImageRow]) -> list[Image]:
    """These images as users see them. Does not load their trees, which may have very many hosts."""
    n, ids = node_table.c, [image.id for image in images]
    origins: dict[int, list[str]] = {}
    found = select(n.image_id, n.host).where(n.image_id.in_(ids), n.slot <= 0).order_by(n.slot.desc())
    for image_id, host in session.execute(found):
        origins.setdefault(image_id, []).append(host)
    counted = select(n.image_id, func.count()).where(n.image_id.in_(ids), n.slot > 0).group_by(n.image_id)
    nodes: dict[int, int] = dict(session.execute(counted).all())
    return [
        Image(
            name=image.name,
            size=image.size,
            digest=image.digest,
            origins=origins.get(image.id, []),
            nodes=nodes.get(image.id, 0),
            revision=image.revision,
            withdrawn=image.withdrawn,
            parent=image.parent,
        )
        for image in images
    ]


def forget_boot_set(session: Session, digest: str) -> None:
    """Delete what is known of how images with a digest boot, unless such an image is published."""
    session.flush()
    if session.scalar(select(ImageRow.id).where(ImageRow.published, ImageRow.digest == digest)) is None:
        session.execute(delete(BootSetRow).where(BootSetRow.digest == digest))


def alive_hosts(session: Session, names: Collection[str]) -> list[str]:
    """Those of these hosts whose leases run, by name."""
    query = select(HostRow.name).where(HostRow.name.in_(names), HostRow.state == HostState.ALIVE)
    return list(session.scalars(query.order_by(HostRow.name)))


def withdrawn_images(session: Session, nodes: Mapping[str, Row[Any]]) -> set[str]:
    """The withdrawn ones of a host's images. Of those that the host is an origin of, only what no other host needs."""
    withdrawn = {name: row for name, row in nodes.items() if row.withdrawn}
    if not withdrawn:
        return set()
    ids = [row.image_id for row in withdrawn.values()]
    read = select(node_table.c.image_id).where(node_table.c.slot > 0, node_table.c.image_id.in_(ids))
    awaited = select(departure_table.c.image_id).where(departure_table.c.awaited, departure_table.c.image_id.in_(ids))
    needed = set(session.scalars(union(read, awaited)))
    return {name for name, row in withdrawn.items() if row.slot > 0 or row.image_id not in needed}


def unneeded_digests(session: Session, digests: Collection[str]) -> set[str]:
    """Those of these digests whose images are all withdrawn, or removed after that."""
    if not digests:
        return set()
    found = select(ImageRow.digest).where(ImageRow.digest.in_(digests))
    withdrawn = set(session.scalars(found.where(ImageRow.withdrawn)))
    return withdrawn - set(session.scalars(found.where(ImageRow.published, not_(ImageRow.withdrawn))))
