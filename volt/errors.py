"""What can go wrong between a host, a person and Volt.

VoltError
├── VoltUnreachable      no connection, or it broke
├── VoltTimeout          no answer in time
├── BadAnswer            an answer that is not Volt's API
├── BadUrl               what was given as Volt's URL is none
├── TokenFileUnusable    the token file is missing, empty, or readable by everyone
├── Problem              Volt refused, with a problem document (RFC 9457)
│   ├── BadRequest       the request is not what the OpenAPI document says
│   ├── Unauthorized     no bearer token, or a wrong one
│   ├── NoSuchPath       no such path in the API
│   ├── BadMethod        the path exists, the method does not
│   ├── TooLarge         the request's body is too large
│   ├── InternalError    a fault of Volt; its log has the cause
│   ├── StoreDown        the database does not answer
│   ├── HostUnknown      the host is not registered
│   ├── HostTaken        another agent runs under the host's name
│   ├── ImageUnknown     no such image is published
│   ├── NodeUnknown      the host has no place in the image's tree
│   ├── ImageConflict    the name is taken by other content
│   ├── ImageInUse       hosts other than origins still have the image
│   ├── ImageWithdrawn   the image is withdrawn, and the host has not got it
│   ├── HostHasNode      a host that reads an image from the tree cannot publish it
│   └── OriginNeeded     the last origin of an image cannot leave it
└── CannotServe          `volt serve` cannot start
    ├── ListenRefused    the address is malformed, taken, or open without a token
    └── StoreUnusable    the database cannot be opened or upgraded
"""

from __future__ import annotations

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
    status: int = 500
    title: ClassVar[str] = "Problem"

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

    slug = "bad-request"
    status = 400
    title = "Bad request"


class Unauthorized(Problem):
    """No bearer token, or a wrong one."""

    slug = "unauthorized"
    status = 401
    title = "A valid bearer token is needed"


class NoSuchPath(Problem):
    """The API has no such path."""

    slug = "no-such-path"
    status = 404
    title = "No such path"


class BadMethod(Problem):
    """The path exists, the method does not."""

    slug = "bad-method"
    status = 405
    title = "Method not allowed"


class TooLarge(Problem):
    """The request's body is too large."""

    slug = "too-large"
    status = 413
    title = "Request too large"


class InternalError(Problem):
    """A fault of Volt; its log has the cause."""

    slug = "internal-error"
    status = 500
    title = "Internal error"


class StoreDown(Problem):
    """The database does not answer; the request changed nothing."""

    slug = "store-down"
    status = 503
    title = "The store does not answer"


class HostUnknown(Problem):
    """The host is not registered: it has to register, then join its images again."""

    slug = "host-unknown"
    status = 404
    title = "Host unknown"


class HostTaken(Problem):
    """Another agent runs under the host's name, and its lease has not run out: nothing was changed."""

    slug = "host-taken"
    status = 409
    title = "Another agent runs under this host name"


class ImageUnknown(Problem):
    """No image of this name is published."""

    slug = "image-unknown"
    status = 404
    title = "Image unknown"


class NodeUnknown(Problem):
    """The host has no place in the image's tree."""

    slug = "node-unknown"
    status = 404
    title = "Host is not in the image's tree"


class ImageConflict(Problem):
    """The image's name is taken by other content."""

    slug = "image-conflict"
    status = 409
    title = "The name is taken by other content"


class ImageInUse(Problem):
    """Hosts other than origins still have the image; ``hosts`` names them."""

    slug = "image-in-use"
    status = 409
    title = "Image in use"


class ImageWithdrawn(Problem):
    """The image is withdrawn: hosts that have it keep it while they need it, and no other host gets it."""

    slug = "image-withdrawn"
    status = 409
    title = "Image withdrawn"


class HostHasNode(Problem):
    """A host that reads an image from the tree has to leave it before it can publish it."""

    slug = "host-has-node"
    status = 409
    title = "Host reads the image from the tree"


class OriginNeeded(Problem):
    """The last origin of an image cannot leave; remove the image instead."""

    slug = "origin-needed"
    status = 409
    title = "The image's last origin cannot leave"


class CannotServe(VoltError):
    """``volt serve`` cannot start."""


class ListenRefused(CannotServe):
    """The address to listen on is malformed, taken, or open to other machines without a token."""


class StoreUnusable(CannotServe):
    """The database cannot be opened or upgraded."""
