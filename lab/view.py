"""What a person sees while VMs boot: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from volt.client import ImageTree, TreeNode
from volt.text import size_text


class View:
    """Context manager. VMs report with ``vm``; whoever knows the tree hands it to ``tree``. May be used by threads."""

    def __init__(self) -> None:
        self.console = Console()
        self._lock = threading.Lock()
        self._title, self._since = "", time.monotonic()
        self._vms: dict[str, tuple[str, str]] = {}
        self._tree: ImageTree | None = None
        self._live = Live(get_renderable=self._draw, console=self.console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        """Begin to draw, if there is a terminal."""
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the terminal back."""
        if self.console.is_terminal:
            self._live.stop()

    def phase(self, title: str) -> None:
        """Something new begins; the table starts empty."""
        with self._lock:
            self._title, self._since = title, time.monotonic()
            self._vms, self._tree = {}, None
        self.say(f"[bold]{title}[/bold]")

    def say(self, line: str) -> None:
        """A line that stays. A log without a terminal has it at once."""
        self.console.print(line, highlight=False, soft_wrap=True)

    def vm(self, name: str, host: str, state: str, *, final: bool = False) -> None:
        """A VM's state changed; ``final`` ones are printed as lines too."""
        with self._lock:
            self._vms[name] = (host, state)
        if final:
            self.say(f"  {name} on {host}: {state}")

    def tree(self, tree: ImageTree) -> None:
        """The image's tree as Volt has it now."""
        with self._lock:
            self._tree = tree

    def _draw(self) -> RenderableType:
        with self._lock:
            head = Text(f"{self._title}: {time.monotonic() - self._since:.0f} s", style="bold")
            if not self._vms:
                return head
            table = Table(box=None, pad_edge=False, header_style="bold")
            for column in ("HOST", "READS FROM", "FETCHED", "VMS"):
                table.add_column(column, no_wrap=column != "VMS")
            rows = flatten(self._tree.root) if self._tree else []
            for depth, node in rows:
                fetched = size_text(node.fetched_bytes) if depth else "has it all"
                table.add_row("  " * depth + node.host, node.parent or "-", fetched, self._vms_of(node.host))
            for host in sorted({host for host, _ in self._vms.values()} - {node.host for _, node in rows}):
                table.add_row(host, "joining", "-", self._vms_of(host))
            return Group(head, table)

    def _vms_of(self, host: str) -> str:
        return ", ".join(f"{name} {state}" for name, (at, state) in sorted(self._vms.items()) if at == host)


def flatten(node: TreeNode, depth: int = 0) -> list[tuple[int, TreeNode]]:
    """A tree's nodes with their depths, each before its children."""
    return [(depth, node), *(row for child in node.children for row in flatten(child, depth + 1))]
