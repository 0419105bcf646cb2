"""What images hold: published at their origins, or waiting there as the disk of a persistent image."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from opennebula_tm.driver.card import Card, Cards, Kept
from opennebula_tm.driver.disks import Described, Disks, Ref, Source
from opennebula_tm.driver.errors import DriverError, FrontendFailed, HostFailed, NotThere, Refused
from opennebula_tm.driver.moving import ALL, Streams
from opennebula_tm.driver.names import OURS, snapshot
from opennebula_tm.driver.remote import Hosts

log = logging.getLogger(__name__)


class Origins:
    """The hosts that have the content of a datastore's images for all others. All calls raise HostFailed."""

    def __init__(self, hosts: Hosts, streams: Streams, folder: PurePosixPath) -> None:
        """``folder`` of the datastore; it is made on the hosts as well."""
        self._hosts = hosts
        self._streams = streams
        self._ours = str(folder / OURS)

    def source(self, host: str, disk: str) -> Source:
        """A disk that waits at a host, to be sent."""
        return Source(host, (self._ours, disk), disk)

    def describe(self, host: str, disk: str) -> Described | None:
        """A disk that waits at a host; None if it does not."""
        return Disks(self._hosts).describe(self.source(host, disk))

    def publish(self, card: Card, image: str, publish_at: Callable[[str], str]) -> Card:
        """Publish an image at all origins. Returns the card with it, to be written down.

        ``publish_at`` does it at one, and returns what that host said. After an error nothing is left of it.
        """
        digest = ""
        tried = list[str]()
        try:
            for host in card.origins:
                tried.append(host)  # also if its answer is lost
                digest = _digest(host, publish_at(host))  # the same at all of them: Volt sees to that
        except DriverError:
            for host in tried:
                self.try_sweep(host, card)
            raise
        return replace(card, image=image, digest=digest)

    def from_disk(self, host: str, image: str, disk: str, base: str = "") -> str:
        """Publish at a host what a disk there holds, or a new disk of the image ``base``. Returns what it said."""
        return self._hosts.transfer(host, "publish", self._ours, image, image, disk, base)

    def receive(
        self, host: str, disk: str, over: str, source: Source | Path, options: tuple[str, ...] = ALL, size: int = 0
    ) -> None:
        """Have a host keep what another disk holds, or a stream in a file of the front end.

        ``size``: bytes that it has there at least.
        """
        arguments = (self._ours, disk, "", disk, over, "")
        if isinstance(source, Source):
            self._streams.forward(source, host, arguments, options)
        else:
            self._streams.give(source, host, arguments)
        if size:
            Disks(self._hosts).grow(self.source(host, disk), size)

    def send(self, source: Source, ref: Ref, over: str, disk_format: str) -> None:
        """Send a disk that waits at a host to a VM."""
        self._streams.forward(source, ref.host, (*ref.lock, ref.link, ref.name, over, disk_format))

    def upload(self, host: str, image: str, archive: Path) -> str:
        """Publish a file of the front end, which is in a tar under the name ``disk``. Also raises FrontendFailed."""
        try:
            with archive.open("rb") as source:
                return self._hosts.transfer(host, "upload", self._ours, image, image, stdin=source)
        except OSError as error:
            raise FrontendFailed(f"cannot read {archive}: {error.strerror}") from error

    def export(self, host: str, name: str, target: Path, *, image: bool) -> None:
        """Write what a disk, or an image, holds to a file of the front end, as qcow2. Also raises FrontendFailed."""
        options = ["--image"] if image else []
        try:
            with target.open("wb") as file:
                self._hosts.transfer(host, "export", self._ours, name, name, *options, stdout=file)
        except OSError as error:
            raise FrontendFailed(f"cannot write {target}: {error.strerror}") from error

    def sweep(self, host: str, card: Card) -> None:
        """Remove what a host has of an image and its card does not name: what was replaced, and what was cut off."""
        named = [card.image, *([card.kept.disk, card.kept.over] if card.kept else [])]
        self._hosts.run(host, "sweep", self._ours, card.name, *(name for name in named if name))

    def try_sweep(self, host: str, card: Card) -> bool:
        """As ``sweep``, which can be left for the next time. Returns whether it was done."""
        return attempt(f"what {card.name} had before stays", lambda: self.sweep(host, card))

    def forget_snapshot(self, host: str, disk: str, number: int) -> None:
        """Delete a snapshot of a disk that waits at a host; what is not there is fine."""
        with contextlib.suppress(NotThere):
            self._hosts.run(host, "forget", self._ours, disk, disk, snapshot(number))

    def revert(self, host: str, disk: str, number: int) -> None:
        """Let a disk that waits at a host hold what it held then."""
        self._hosts.run(host, "revert", self._ours, disk, "", disk, snapshot(number))

    def room(self, host: str) -> tuple[int, int]:
        """Bytes in all and bytes free where a host keeps its images."""
        about = read_json(host, self._hosts.run(host, "status"))["disks"]
        return int(about["total"]), int(about["free"])


def attempt(otherwise: str, act: Callable[[], None]) -> bool:
    """Do what need not succeed. Returns whether it did."""
    try:
        act()
    except HostFailed as error:
        log.warning("%s: %s", otherwise, error)
        return False
    return True


class Contents:
    """The content of one image: reads and writes its card, which the caller has locked for what changes it."""

    def __init__(self, cards: Cards, path: PurePosixPath, origins: Origins) -> None:
        self._cards = cards
        self._path = path
        self._origins = origins

    @property
    def card(self) -> Card:
        """Its card as it is now."""
        return self._cards.read(self._path)

    def settled(self) -> Card:
        """The card, once its image holds what VMs are to get. It takes the lock itself, if something is to be done."""
        card = self.card
        if card.kept is None:
            return card
        with self._cards.locked(self._path):
            card = self.card
            return card if card.kept is None else self._publish_kept(card, card.kept)

    def _publish_kept(self, card: Card, kept: Kept) -> Card:
        """What a persistent image's last VM left becomes an image of its own, which others can be made of."""
        card, name = self._named(card, "g")

        def publish_at(host: str) -> str:
            if host not in kept.at:
                self._origins.receive(host, kept.disk, kept.over, self._origins.source(kept.at[0], kept.disk))
            return self._origins.from_disk(host, name, kept.disk)

        published = self._origins.publish(card, name, publish_at)
        return self._replaced(replace(published, kept=None))

    def fill(self, over: str, source: Source | Path, options: tuple[str, ...] = ALL, *, size: int = 0) -> Card:
        """What a VM's disk holds becomes what the image holds: each origin receives the disk, and publishes that.

        ``size``: bytes that the image has at least.
        """
        card, name = self._named(self.card, "g")
        copy = f"{name}-t"

        def publish_at(host: str) -> str:
            self._origins.receive(host, copy, over, source, options, size)
            return self._origins.from_disk(host, name, copy)

        return self._replaced(self._origins.publish(card, name, publish_at))

    def keep(self, over: str, source: Source | Path, of: str, size: int = 0) -> Card:
        """Have what a VM's disk holds wait at the origins. Those that cannot take it are left out, but for the last.

        ``size``: bytes that the disk has at least.

        Raises HostFailed with what each of them said if none could.
        """
        card, name = self._named(self.card, "k")
        at, failed = list[str](), list[str]()
        for host in card.origins:
            try:
                self._origins.receive(host, name, over, source, size=size)
                at.append(host)
            except HostFailed as error:
                log.warning("%s does not keep %s: %s", host, name, error)
                failed.append(str(error))
        if not at:
            raise HostFailed("; ".join(failed))
        return self._replaced(replace(card, kept=Kept(name, tuple(at), over, of), used_by=""))

    def _replaced(self, card: Card) -> Card:
        """Write down what holds from now on, and let the origins forget what held before."""
        self._cards.write(self._path, card)
        for host in card.origins:
            self._origins.try_sweep(host, card)
        return card

    def give(self, ref: Ref, disks: Disks, size: int, monitor: str) -> None:
        """Give a persistent image's disk to a VM; what is there of a call that was cut off is taken."""
        card = self.card
        found = disks.describe(ref) if card.used_by == ref.name else None
        # OpenNebula gives a disk's number again to a disk of another image, if that could not be attached.
        if found is not None and found.image == (card.kept.over if card.kept else card.image):
            disks.link(ref, found.path, monitor)
            return
        if card.kept is None:
            disks.create(ref, card.published, size, card.format, monitor=monitor, fresh=True)
        else:
            self._send_kept(card, card.kept, ref)
            found = disks.there(ref)
            if size > found.size:
                disks.resize(ref, size)
            disks.link(ref, found.path, monitor)
        kept = replace(card.kept, of="") if card.kept else None
        self._cards.write(self._path, replace(card, used_by=ref.name, kept=kept))

    def _send_kept(self, card: Card, kept: Kept, ref: Ref) -> None:
        failed = list[str]()
        for host in kept.at:
            source = self._origins.source(host, kept.disk)
            try:
                self._origins.send(source, ref, kept.over, card.format)
            except HostFailed as error:
                failed.append(str(error))
            else:
                return
        raise HostFailed("; ".join(failed))

    def revert(self, number: int) -> None:
        """Let the disk that waits hold what it held at a snapshot. Origins that cannot do it are left out.

        Before the first of them does, the card names that one alone: no two may hold different content and be named.
        Raises Refused, HostFailed.
        """
        card = self.card
        if card.kept is None:
            raise Refused(f"image {card.name} has no snapshot {number}")
        first = self._with_snapshot(card, card.kept, number)
        self._cards.write(self._path, replace(card, kept=replace(card.kept, at=(first,))))
        self._origins.revert(first, card.kept.disk, number)
        others = [host for host in card.kept.at if host != first and self._reverted(host, card, card.kept, number)]
        self._cards.write(self._path, replace(card, kept=replace(card.kept, at=(first, *others))))

    def _reverted(self, host: str, card: Card, kept: Kept, number: int) -> bool:
        otherwise = f"{host} does not keep {card.name} any more"
        return attempt(otherwise, lambda: self._origins.revert(host, kept.disk, number))

    def _with_snapshot(self, card: Card, kept: Kept, number: int) -> str:
        """The first origin that answers, where the disk must have the snapshot. Raises Refused, HostFailed."""
        failed = list[str]()
        for host in kept.at:
            try:
                found = self._origins.describe(host, kept.disk)
            except HostFailed as error:
                failed.append(str(error))
                continue
            if found is not None:
                if snapshot(number) in found.snapshots:
                    return host
                raise Refused(f"image {card.name} has no snapshot {number}")
        raise HostFailed("; ".join(failed) or f"no origin has the disk of image {card.name}")

    def leave_to(self, vms: Sequence[int]) -> None:
        """Note that the image was deleted, and stays for the disks of these VMs. Raises FrontendFailed."""
        self._cards.write(self._path, replace(self.card, left_to=tuple(vms)))

    def remove(self) -> None:
        """Remove the image, its disk and its card. Raises HostFailed; a repeated call goes on."""
        card = self.card
        for host in card.origins:
            self._origins.sweep(host, replace(card, image="", kept=None))
        self._cards.remove(self._path)

    def _named(self, card: Card, letter: str) -> tuple[Card, str]:
        """A name that nobody ever uses again, also if this call is cut off."""
        card, name = card.next_name(letter)
        self._cards.write(self._path, card)
        return card, name


def read_json(host: str, answer: str) -> Any:
    """What ``virtman --json`` printed. Raises HostFailed."""
    try:
        return json.loads(answer)
    except ValueError as error:
        raise HostFailed(f"{host}: virtman's answer is no JSON: {error}") from error


def _digest(host: str, answer: str) -> str:
    return str(read_json(host, answer)["digest"])
