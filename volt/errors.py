"""Errors of Volt and its client.

Each subclass of Problem is one kind of problem document: Volt sends it, and the client raises it again.
"""

from __future__ import annotations

import re
from typing import ClassVar

TYPE_PREFIX = "urn:volt:problem:"


class VoltError(Exception):
    """Anything that goes wrong with Volt: ``volt serve`` cannot start, settings are wrong, what answers is no Volt."""


class VoltUnreachable(VoltError):
    """No connection to Volt, or no whole answer in time. The call may have taken effect."""


class Problem(VoltError):
    """Volt refused a request, or failed. ``detail`` says why, for people; ``hosts`` names the hosts concerned, if any.

    A client raises this class itself for a kind of problem that only a later version of Volt knows. Its ``status``
    then says whether Volt refused (4xx) or failed (5xx).
    """

    slug: ClassVar[str] = "problem"
    """The class's name in lower case with hyphens: the end of the problem's type."""
    status: int = 500
    """The HTTP status."""

    def __init_subclass__(cls, status: int = 500) -> None:
        cls.slug = re.sub(r"(?<=.)(?=[A-Z])", "-", cls.__name__).lower()
        cls.status = status

    def __init__(self, detail: str, hosts: tuple[str, ...] = ()) -> None:
        """Keep the explanation and the hosts concerned."""
        super().__init__(detail)
        self.detail = detail
        self.hosts = hosts

    @classmethod
    def type(cls) -> str:
        """The ``type`` of the problem document: an identifier, not an address."""
        return TYPE_PREFIX + cls.slug


class BadRequest(Problem, status=400):
    """The request is not what the OpenAPI document says; its status may also be 404, 405 or 413."""


class Unauthorized(Problem, status=401):
    """No bearer token, or a wrong one."""


class InternalError(Problem):
    """A fault of Volt; its log has the cause."""


class StoreDown(Problem, status=503):
    """The database does not answer; the request changed nothing."""


class HostUnknown(Problem, status=404):
    """The host is not registered: it has to register, then join its images again."""


class HostTaken(Problem, status=409):
    """Another agent runs under the host's name, and its lease has not run out: nothing was changed."""


class ImageUnknown(Problem, status=404):
    """No image of this name is published."""


class DeploymentUnknown(Problem, status=404):
    """There is no deployment of this number."""


class NodeUnknown(Problem, status=404):
    """The host has no place in the image's tree."""


class ImageConflict(Problem, status=409):
    """The image's name is taken by other content."""


class ImageInUse(Problem, status=409):
    """Hosts other than origins still have the image; ``hosts`` names them."""


class ImageWithdrawn(Problem, status=409):
    """The image is withdrawn: hosts that have it keep it while they need it, and no other host gets it."""


class HostHasNode(Problem, status=409):
    """A host that reads an image from the tree has to leave it before it can publish it."""


class OriginNeeded(Problem, status=409):
    """The last origin of an image cannot leave; remove the image instead."""


KINDS = {problem.type(): problem for problem in Problem.__subclasses__()}
"""The problems by the ``type`` of their documents."""
