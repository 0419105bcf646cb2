"""What the lab starts and stops as a whole."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from lab.errors import LabError

log = logging.getLogger(__name__)


class Running(ABC):
    """A context manager of something that runs."""

    @abstractmethod
    def start(self) -> None:
        """Start all of it and wait until it answers. Raises LabError."""

    @abstractmethod
    def stop(self) -> None:
        """Stop what was started, however far that got. Raises LabError."""

    def __enter__(self) -> Self:
        """Start, and leave nothing if that fails half way."""
        try:
            self.start()
        except BaseException:
            log.exception("%s could not be started", type(self).__name__)
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop. An error of the body is not hidden by one of the clean-up."""
        try:
            self.stop()
        except LabError:
            if error is None:
                raise
            log.exception("cleaning up failed too")
