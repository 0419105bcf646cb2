"""What can go wrong between a host, a person and Volt."""

from __future__ import annotations

import re
from typing import ClassVar

TYPE_PREFIX = "urn:volt:problem:"


class VoltError(Exception):
    """Anything that goes wrong with Volt."""


class VoltUnreachable(VoltError):
    """No connection to Volt, or it broke before the answer was complete. The call may have taken effect."""


class VoltTimeout(VoltError):
    """Volt did not answer in time. The call may have taken effect."""


class BadAnswer(VoltError):
    """Something answered, but not with what Volt's API says."""


class BadUrl(VoltError):
    """What was given as Volt's URL is none of HTTP."""


class TokenFileUnusable(VoltError):
    """The token file is missing, empty, or readable by everyone."""


class Problem(VoltError):
    """Volt refused a request. ``detail`` says why, for people; ``hosts`` names the hosts concerned, if any.

    Of this very class where only a later version knows the kind; its ``status`` says then whether Volt refused (4xx).
    """

    slug: ClassVar[str] = "problem"
    """The words of the class's name, at the end of the problem type."""
    status: int = 500

    def __init_subclass__(cls) -> None:
        """Set the slug."""
        cls.slug = re.sub(r"(?<=.)(?=[A-Z])", "-", cls.__name__).lower()

    def __init__(self, detail: str, hosts: tuple[str, ...] = ()) -> None:
        """Keep the explanation and the hosts concerned."""
        super().__init__(detail)
        self.detail = detail
        self.hosts = hosts

    @classmethod
    def type(cls) -> str:
        """The ``type`` of the problem document: an identifier, not an address."""
        return TYPE_PREFIX + cls.slug


class BadRequest(Problem):
    """The request is not what the OpenAPI document says."""

    status = 400


class Unauthorized(Problem):
    """No bearer token, or a wrong one."""

    status = 401


class NoSuchPath(Problem):
    """The API has no such path."""

    status = 404


class BadMethod(Problem):
    """The path exists, the method does not."""

    status = 405


class TooLarge(Problem):
    """The request's body is too large."""

    status = 413


class InternalError(Problem):
    """A fault of Volt; its log has the cause."""


class StoreDown(Problem):
    """The database does not answer; the request changed nothing."""

    status = 503


class HostUnknown(Problem):
    """The host is not registered: it has to register, then join its images again."""

    status = 404


class HostTaken(Problem):
    """Another agent runs under the host's name, and its lease has not run out: nothing was changed."""

    status = 409


class ImageUnknown(Problem):
    """No image of this name is published."""

    status = 404


class NodeUnknown(Problem):
    """The host has no place in the image's tree."""

    status = 404


class ImageConflict(Problem):
    """The image's name is taken by other content."""

    status = 409


class ImageInUse(Problem):
    """Hosts other than origins still have the image; ``hosts`` names them."""

    status = 409


class ImageWithdrawn(Problem):
    """The image is withdrawn: hosts that have it keep it while they need it, and no other host gets it."""

    status = 409


class HostHasNode(Problem):
    """A host that reads an image from the tree has to leave it before it can publish it."""

    status = 409


class OriginNeeded(Problem):
    """The last origin of an image cannot leave; remove the image instead."""

    status = 409


class CannotServe(VoltError):
    """``volt serve`` cannot start."""


class ListenRefused(CannotServe):
    """The address to listen on is malformed, taken, or open to other machines without a token."""


class StoreUnusable(CannotServe):
    """The database cannot be opened or upgraded."""
