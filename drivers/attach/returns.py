"""Whether an only parent that is back is read by at once: nothing could be better, and to ask it first takes time."""

from __future__ import annotations

from drivers.kernel.tcpsockets import Link


class Returns:
    """Those of one image's only parent. For one thread."""

    def __init__(self) -> None:
        """It is asked the first time."""
        self.forget()

    def forget(self) -> None:
        """It is not the only one."""
        self._link: Link | None = None
        self._answered = 0

    def is_trusted(self, link: Link | None, answered: int) -> bool:
        """Whether it need not be asked: it has a new connection, and has answered reads since it was taken in last.

        Else it may answer with errors, or end its connection instead, each time. ``answered``: how many reads have been
        by now. To be called whenever it is about to be taken in.
        """
        before, had = self._link, self._answered
        self._link, self._answered = link, answered
        return before is not None and link is not None and link != before and answered > had
