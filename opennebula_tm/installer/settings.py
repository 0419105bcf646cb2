"""One line of /etc/default/virtman-agent: the group that may reach the agent's socket. Pure functions."""

from __future__ import annotations

import re

from opennebula_tm.installer.errors import BadSyntax
from opennebula_tm.installer.template import line_end

VARIABLE = "VIRTMAN_GROUP"
SET = re.compile(rf"(?m)^[ \t]*{VARIABLE}=(.*?)\r?$")


def group_of(text: str) -> str | None:
    """The group that is set, or None. Raises BadSyntax if it is set twice."""
    found = list(SET.finditer(text))
    if len(found) > 1:
        raise BadSyntax(text.count("\n", 0, found[1].start()) + 1, f"{VARIABLE} is set again")
    return found[0][1].strip().strip("\"'") if found else None


def set_group(text: str, group: str) -> str:
    """The text with the group in it. Raises BadSyntax if there is another one."""
    present = group_of(text)
    if present == group:
        return text
    if present is not None:
        found = SET.search(text)
        line = text.count("\n", 0, found.start() if found else 0) + 1
        raise BadSyntax(line, f'{VARIABLE} is "{present}": name it with --group, or change it')
    if not text:
        return f"{VARIABLE}={group}\n"
    end = len(text.removesuffix("\n").removesuffix("\r")) if text.endswith("\n") else len(text)
    return f"{text[:end]}{line_end(text)}{VARIABLE}={group}{text[end:]}"


def unset_group(text: str, group: str) -> str:
    """The text without the line of ``set_group``, wherever it stands now."""
    line = rf"{VARIABLE}={re.escape(group)}"
    shorter, count = re.subn(rf"\r?\n{line}(?=\r?\n|\Z)", "", text, count=1)
    return shorter if count else re.sub(rf"\A{line}(?:\r?\n|\Z)", "", text, count=1)
