"""What goes wrong in a driver script. The message is the one line that OpenNebula's users see."""

from __future__ import annotations


class DriverError(Exception):
    """An action that failed. Base of all others."""


class Refused(DriverError):
    """What was asked for cannot be done, and nothing was changed."""


class FrontendFailed(DriverError):
    """The front end could not do its part: a command of OpenNebula, a file, the disk."""


class HostFailed(DriverError):
    """A host could not be reached, did not answer in time, or said no."""


class NotThere(HostFailed):
    """What an action is about is not on the host where it should be."""
