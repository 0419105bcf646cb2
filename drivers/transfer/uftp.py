"""By UFTP: files that one host multicasts, one after the other.

Options as in uftp(1) and uftpd(1). What a receiver missed of a file is sent again in the next pass over it; a receiver
that misses too much is dropped. Keys are of one transfer, and never leave their host: others know them by fingerprint.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from drivers.base import Image, Place, Range
from drivers.door import door
from drivers.errors import CommandFailed, DriverError, NoSpace
from drivers.host.command import run
from drivers.host.folders import matching
from drivers.host.retry import until
from drivers.host.space import Room
from drivers.needs import Needs, Tool
from drivers.transfer import multicast
from drivers.transfer.contract import Content, Terms
from drivers.transfer.program import Program

log = logging.getLogger(__name__)

GROUPS = ipaddress.ip_network("232.192.0.0/14")
"""Of these a host joins what one sender sends, and nothing else (RFC 4607); UFTP wants that to know the sender."""
FILE = 128 << 20
"""Bytes of a file. A host has room for a few: a sender reads the next one while it sends."""
BACKLOG = 4
"""Files that may wait for the source. A host that has more is too slow."""
BLOCK = 1400
"""Bytes of the image in a packet: with all headers, and encrypted, it fills the 1500 of an Ethernet."""
TRIES = 50
"""How often a sender asks a receiver that does not answer."""
CRASHES = 5
"""How often a file may be sent again. uftp 4.10.2 crashes when a receiver has to confirm its key twice: packets were
lost (server_phase.c, handle_announce_phase: no deststate)."""
MISSED, SECTIONS = 30, 2
"""A receiver that misses so many percent of so many sections of a file, some 15 MB each, is dropped."""
QUEUE = 128 << 10
"""Bytes that a sender hands to the kernel at once: with more its own network card may drop some."""
CACHE = 1 << 20
"""Bytes that uftpd writes at once."""
RATE = 112_500_000
"""Bytes a second without a limit: 0.9 Gbit/s. UFTP's congestion control would have all wait for the slowest."""
CIPHER = ("-Y", "aes256-gcm", "-e", "ecdh_ecdsa", "-h", "sha256")
_FINGERPRINT = re.compile(r"(?:[0-9A-F]{2}:){19}[0-9A-F]{2}")


@door
class UftpTransfer:
    """All receivers at once. A contact is a line of uftpd's list of servers: id, address and the key's fingerprint."""

    needs = Needs(tools=tuple(Tool(name, "uftp") for name in ("uftp", "uftpd", "uftp_keymgt")), address=True)
    encrypts = True
    multicasts = True

    def __init__(self, place: Place, source: Content, image: Image) -> None:
        self._address, self._source, self._image = place.address, source, image
        self._state = place.state / "transfer"
        self._room = Room(place.state, place.reserve)
        self._folder: Path | None = None
        self._runner = multicast.Runner()
        self._sent = 0

    def offer(self) -> str:
        return self._make_key()

    def expect(self) -> str:
        return self._make_key()

    def _make_key(self) -> str:
        number = multicast.number_of(self._address)
        try:
            self._state.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix="uftp-", dir=self._state))
            said = run(["uftp_keymgt", "-g", "ec:prime256v1", str(self._folder / "key")])
        finally:
            if self._runner.stopped:
                self._delete()
        found = _FINGERPRINT.search(said.stdout + said.stderr)
        if found is None:
            raise DriverError("uftp_keymgt does not tell the fingerprint of a new key")
        return f"0x{number:08X}|{self._address}|{found[0]}"

    def send(self, terms: Terms) -> None:
        with self._working() as folder:
            receivers = list(terms.receivers)
            files = self._files(folder, terms)
            file, following, crashes = next(files, None), None, 0
            while file is not None:
                if not receivers:  # uftp would take anybody
                    raise DriverError("no receiver is left")
                hosts = [contact.split("|") for contact in receivers]
                (folder / "hosts").write_text("".join(f"{number}|{key}\n" for number, _, key in hosts))
                with self._runner.running(Program(self._sender(folder, file, terms))) as program:
                    following = following or next(files, None)
                    try:
                        program.wait()
                    except CommandFailed as error:
                        crashes += 1
                        if error.code != -signal.SIGSEGV or crashes > CRASHES:
                            raise
                        continue
                    receivers = self._whole(folder / "status", receivers, program)
                self._sent += file.stat().st_size
                file.unlink()
                file, following, crashes = following, None, 0

    def _whole(self, status: Path, receivers: Sequence[str], program: Program) -> list[str]:
        """The receivers that got the whole file: nobody waits for the others any more."""
        lines = [line.split(";") for line in status.read_text().splitlines()]
        status.unlink()
        whole = {line[1] for line in lines if line[0] == "RESULT" and line[4] == "copy"}
        left = [contact for contact in receivers if contact.partition("|")[0] in whole]
        if len(left) < len(receivers):
            log.info("uftp: %d of %d receivers are left: %s", len(left), len(receivers), program.said)
        return left

    def _files(self, folder: Path, terms: Terms) -> Iterator[Path]:
        """Each made when it is asked for."""
        for number, batch in enumerate(multicast.batches(terms.ranges, FILE)):
            if self._runner.stopped:
                return
            self._check_room(sum(each.length for each in batch))
            with (folder / str(number)).open("wb") as file:
                self._source.get(self._image, batch, file.fileno())
            yield folder / str(number)

    def _sender(self, folder: Path, file: Path, terms: Terms) -> list[str]:
        control, data = multicast.groups(terms, GROUPS)
        pause = multicast.patience(terms) / (3 * TRIES)  # server_phase.c, announce_phase
        return [
            "uftp", *self._common(terms, control), "-P", data, "-H", f"@{folder / 'hosts'}",
            "-S", str(folder / "status"), "-R", str(8 * (terms.limit or RATE) // 1000), "-b", str(BLOCK),
            "-B", str(QUEUE), "-s", str(TRIES), "-r", f"{pause:.3f}:{pause:.3f}:{pause:.3f}", "-N", str(MISSED),
            "-m", str(SECTIONS), *((*CIPHER, "-k", str(folder / "key"), "-c") if terms.encrypt else ()), str(file),
        ]  # fmt: skip

    def receive(self, terms: Terms) -> None:
        with self._working() as folder:
            quiet = 2 * (multicast.patience(terms) + CACHE / (terms.limit or RATE))
            whole, arriving = folder / "whole", folder / "arriving"
            whole.mkdir()
            arriving.mkdir()
            (folder / "servers").write_text(terms.sender + "\n")
            # The source is given files beside this thread, which sees meanwhile that uftpd does not fill the disk.
            with ThreadPoolExecutor(1) as giving, self._runner.running(Program(self._receiver(folder, terms))):
                given: list[Future[None]] = []
                for number, batch in enumerate(multicast.batches(terms.ranges, FILE)):
                    path = whole / str(number)
                    self._await(path, arriving, quiet if number else quiet + multicast.patience(terms))
                    given.append(giving.submit(self._give, path, batch))
                    for done in filter(Future.done, given):
                        done.result()
                for each in given:
                    each.result()

    def _give(self, path: Path, batch: Sequence[Range]) -> None:
        with path.open("rb") as file:
            if self._source.put(self._image, batch, file.fileno()).full:
                raise DriverError(f"no room for image {self._image.name}")
        path.unlink()

    def _check_room(self, needed: int) -> None:
        """Raises NoSpace."""
        if (free := self._room.spare(self._state)) < needed:
            raise NoSpace(self._state, free, needed)

    def _check_backlog(self, whole: Path) -> None:
        """Raises NoSpace, DriverError."""
        self._check_room(1)
        if len(list(whole.iterdir())) > BACKLOG + 1:  # and the one that the source is given
            raise DriverError("this host is too slow for what comes")

    def _receiver(self, folder: Path, terms: Terms) -> list[str]:
        control, _ = multicast.groups(terms, GROUPS)
        return [
            "uftpd", "-d", "-q", *self._common(terms, control), "-S", str(folder / "servers"),
            "-T", str(folder / "arriving"), "-D", str(folder / "whole"), "-c", str(CACHE), "-B", str(8 << 20),
            "-k", str(folder / "key"), *(("-E",) if terms.encrypt else ()),
        ]  # fmt: skip

    def _common(self, terms: Terms, control: str) -> list[str]:
        number = multicast.number_of(self._address)
        return [
            "-x", "1", "-I", self._address, "-U", f"0x{number:08X}", "-p", str(multicast.port(terms)), "-M", control,
        ]  # fmt: skip

    def _await(self, path: Path, arriving: Path, limit: float) -> None:
        """Wait for a file, which uftpd moves there when it has all of it. ``limit``: seconds in which nothing comes.

        Raises DriverError.
        """
        self._check_backlog(path.parent)
        while not path.exists():
            moves = partial(self._moves, path, arriving, _size(arriving))
            if not until(moves, limit=limit, longest=0.2) or self._runner.stopped:
                raise DriverError("nothing comes any more")

    def _moves(self, path: Path, arriving: Path, before: int) -> bool:
        self._check_backlog(path.parent)
        return path.exists() or self._runner.stopped or _size(arriving) != before

    def stop(self) -> None:
        self._runner.stop()
        self._delete()

    @property
    def sent_bytes(self) -> int:
        return self._sent

    @contextmanager
    def _working(self) -> Iterator[Path]:
        """The folder, which is deleted in the end."""
        if self._folder is None:
            raise DriverError("uftp: this host is not ready")
        try:
            with self._runner.until_stopped():
                yield self._folder
        finally:
            self._delete()

    def _delete(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _size(folder: Path) -> int:
    """Changes with what uftpd has written."""
    with suppress(FileNotFoundError):  # it moves the files
        return sum(path.stat().st_size for path in matching(folder, "*", "*"))
    return -1
