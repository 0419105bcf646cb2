"""Groups of commands whose help cuts nothing off."""

from __future__ import annotations

import click

UNLIMITED = 1 << 16


class Group(click.Group):
    """Its help says the whole first sentence of each command; groups in it are of the same class."""

    group_class = type

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the names of the commands, each with its first sentence folded to the width of the terminal."""
        found = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, one.get_short_help_str(UNLIMITED)) for name, one in found if one is not None and not one.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
