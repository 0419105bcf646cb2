"""Whole images on their way to all hosts, before the first VM of a wave needs them.

The attribute VIRTMAN_METHOD of an image or of its datastore asks for that. OpenNebula copies it into each VM's disk,
the image's first (INHERIT_IMAGE_ATTR and INHERIT_DATASTORE_ATTR in oned.conf). So nobody has to be asked for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any

from opennebula_tm.driver.card import Cards
from opennebula_tm.driver.content import read_json
from opennebula_tm.driver.errors import DriverError, HostFailed, Refused
from opennebula_tm.driver.remote import Hosts

log = logging.getLogger(__name__)

ATTRIBUTE = "VIRTMAN_METHOD"
METHODS = ("auto", "lazy", "tree", "unicast", "bittorrent", "udpcast", "uftp")
RETRY = 600.0
"""Seconds from the end of a deployment that did not reach all of its hosts to the next one, at least."""


def check_method(text: str) -> str:
    """The method that the attribute names, in small letters; "" for none. Raises Refused."""
    method = text.strip().lower()
    if method and method not in METHODS:
        raise Refused(f"{ATTRIBUTE} of the image or its datastore is {text!r}: it may be one of {', '.join(METHODS)}")
    return method


class Deployments:
    """Deployments that agents of ``hosts`` are asked for. ``now``: seconds since 1970."""

    def __init__(self, hosts: Hosts, cards: Cards, now: Callable[[], float] = time.time) -> None:
        self._hosts = hosts
        self._cards = cards
        self._now = now

    def begin(self, host: str, path: PurePosixPath, image: str, method: str) -> None:
        """Have the agent of a host deploy an image to all hosts, unless that was done. ``path``: of the image's card.

        What fails is logged: no VM fails because of it. While another VM's script asks for the same image, this one
        does not: so a wave makes one deployment.
        """
        try:
            if not (checked := check_method(method)):
                return
            with self._cards.locked_at_once(path) as alone:
                if alone and self._is_needed(host, image):
                    log.info("%s", self._hosts.run(host, "deploy", image, checked).strip())
        except DriverError as error:
            log.warning("image %s is not deployed: %s", image, error)

    def _is_needed(self, host: str, image: str) -> bool:
        """Raises HostFailed."""
        answer = self._hosts.run(host, "deployment", image)
        if not answer.strip():
            return True
        try:
            return is_over(read_json(host, answer), self._now())
        except (KeyError, TypeError, ValueError) as error:
            raise HostFailed(f"{host}: virtman describes a deployment in a way that is not understood") from error


def is_over(newest: Mapping[str, Any], now: float) -> bool:
    """Whether the newest deployment of an image leaves room for another: it has ended, and hosts may lack the image.

    One that failed somewhere is repeated, but not by each VM of a wave. Raises KeyError, TypeError, ValueError.
    """
    if not newest["ended"]:
        return False
    created = datetime.fromisoformat(newest["created"]).timestamp()
    if not newest["cancelled"] and all(host["state"] == "whole" for host in newest["hosts"]):
        return now >= created + float(newest["keep_s"])
    return now >= created + float(newest["seconds"]) + RETRY
