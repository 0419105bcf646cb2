"""What goes wrong, as errors of Nova, whose text the user of the server reads as its fault."""

from __future__ import annotations

from nova import exception


class VirtmanError(exception.NovaException):  # type: ignore[misc]
    """Base class; ``reason`` is one line. Nova tries another host if a server cannot be made because of it."""

    msg_fmt = "VirtMan: %(reason)s"


class AgentRefused(VirtmanError):
    """The agent of this host could not do it, or does not answer."""


class DiskLost(VirtmanError):
    """The server's private disk is not on its host. It is not made anew: that would look as if the data were gone."""


class BaseUnavailable(VirtmanError, exception.InvalidInput):  # type: ignore[misc]
    """It is the same on all hosts: the base is withdrawn, say, or cannot be attached. Nova does not try another one."""

    msg_fmt = VirtmanError.msg_fmt
