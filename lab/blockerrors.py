"""Counts the I/O errors that QEMU meets on the disks of VMs, from libvirt's events."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Self

import libvirt

WAKE_MS = 200
"""How often the event loop looks whether it is to end; events themselves come at once."""


class BlockErrors:
    """Context manager; ``seen`` has a line for each error since it was entered, of all VMs of a libvirt."""

    def __init__(self, uri: str) -> None:
        self.seen: list[str] = []
        self._uri = uri
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="libvirt events", daemon=True)

    def __enter__(self) -> Self:
        """Subscribe. The event loop must be registered before the connection is made: libvirt-host.html."""
        libvirt.virEventRegisterDefaultImpl()
        self._connection = libvirt.open(self._uri)
        self._connection.domainEventRegisterAny(None, libvirt.VIR_DOMAIN_EVENT_ID_IO_ERROR_REASON, self._note, None)
        libvirt.virEventAddTimeout(WAKE_MS, lambda _timer, _opaque: None, None)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening."""
        self._done.set()
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        while not self._done.is_set():
            libvirt.virEventRunDefaultImpl()

    def _note(self, _connection: Any, domain: Any, *details: Any) -> None:
        _path, disk, _action, reason, _opaque = details
        self.seen.append(f"{domain.name()} {disk}: {reason or 'I/O error'}")
