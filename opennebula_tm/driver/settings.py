"""The settings of the driver: ``etc/tm/virtman/virtman.conf`` below OpenNebula's remotes."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from pathlib import Path

from opennebula_tm.driver.errors import FrontendFailed

FILE = Path("etc/tm/virtman/virtman.conf")


@dataclass(frozen=True)
class Settings:
    """``step``, ``transfer`` and ``lock``: seconds; see the comments in the file."""

    virtman: str = "virtman"
    ssh_options: tuple[str, ...] = ()
    step: float = 900.0
    transfer: float = 86400.0
    lock: float = 600.0
    libvirt_uri: str = "qemu:///system"


def read(remotes: Path) -> Settings:
    """The settings; without the file those above. Raises FrontendFailed."""
    file = remotes / FILE
    try:
        text = file.read_text()
    except FileNotFoundError:
        return Settings()
    except (OSError, UnicodeDecodeError) as error:
        raise FrontendFailed(f"cannot read {file}: {error}") from error
    return parse(text, str(file))


def parse(text: str, name: str) -> Settings:
    """Settings of lines ``KEY=value``, quoted as for a shell. Raises FrontendFailed."""
    kinds = {field.name: type(field.default) for field in fields(Settings)}
    found: dict[str, object] = {}
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{name}, line {number}"
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise FrontendFailed(f"{where}: {error}") from error
        if not words:
            continue
        key, equals, value = words[0].partition("=")
        kind = kinds.get(key.lower())
        if not equals or len(words) > 1 or kind is None:
            raise FrontendFailed(f"{where}: not KEY=value with one of {', '.join(map(str.upper, kinds))}")
        found[key.lower()] = _value(kind, value, where)
    return Settings(**found)  # type: ignore[arg-type]


def _value(kind: type, value: str, where: str) -> object:
    if kind is tuple:
        try:
            return tuple(shlex.split(value))
        except ValueError as error:
            raise FrontendFailed(f"{where}: {error}") from error
    if kind is not float:
        return value
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 10**7:
        raise FrontendFailed(f"{where}: {value!r} is no number of seconds above 0")
    return seconds
