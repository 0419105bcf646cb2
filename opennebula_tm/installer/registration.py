"""What makes OpenNebula know the drivers, in the texts of its settings: pure functions, each with its way back.

Each change is made so that it can be found and taken away again whatever stands around it: a word in a list, or a block
that a comment of ours precedes. Without the option of a list OpenNebula takes all drivers that it finds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from opennebula_tm.driver.deploying import ATTRIBUTE
from opennebula_tm.installer.errors import BadSyntax, Refused
from opennebula_tm.installer.template import Attribute, Value, attributes, line_end

DRIVER = "virtman"
MARK = "# Written by VirtMan's opennebula_tm/install, which also takes it away (--remove)."
LIVE = "LIVE_DISK_SNAPSHOTS"
LIVE_PAIRS = ("kvm-virtman", "qemu-virtman")
INHERIT = ("INHERIT_IMAGE_ATTR", "INHERIT_DATASTORE_ATTR")
"""What names attributes that a VM's disk gets from its image, and from its datastore if the image has none."""


@dataclass(frozen=True)
class DriverList:
    """A list of drivers in the ARGUMENTS of the block ``block`` that starts ``executable``. ``key``: in our record."""

    block: str
    executable: str
    options: tuple[str, str]

    @property
    def key(self) -> str:
        return f"{self.block} {self.options[0]}"


LISTS = (
    DriverList("TM_MAD", "one_tm", ("-d", "--tm-types")),
    DriverList("DATASTORE_MAD", "one_datastore", ("-d", "--ds-types")),
    DriverList("DATASTORE_MAD", "one_datastore", ("-s", "--system-ds-types")),
)


def _transfer_manager(stack: str) -> dict[str, str]:
    """``SHARED=NO`` and the modes for the system datastores of ssh and local; a mode needs all three of its values."""
    kind, driver = ("BLOCK", "raw") if stack == "kernel" else ("FILE", "qcow2")
    modes: dict[str, str] = {}
    for mode in ("SSH", "LOCAL"):
        modes |= {f"LN_TARGET_{mode}": "NONE", f"CLONE_TARGET_{mode}": "SYSTEM", f"DISK_TYPE_{mode}": kind}
    return {
        "NAME": DRIVER, "LN_TARGET": "NONE", "CLONE_TARGET": "SYSTEM", "SHARED": "NO", "DRIVER": driver,
        "DISK_TYPE": kind, "TM_MAD_SYSTEM": "ssh,local", **modes, "DS_MIGRATE": "YES", "DS_LIVE_MIGRATE": "NO",
        "DS_MIGRATE_SNAP": "YES", "PERSISTENT_SNAPSHOTS": "YES", "ALLOW_ORPHANS": "YES",
    }  # fmt: skip


def blocks(stack: str) -> dict[str, dict[str, str]]:
    """The blocks of ``kernel`` or ``chunkstore``, by the name of the block that the drivers are told in."""
    datastore = {
        "NAME": DRIVER,
        "REQUIRED_ATTRS": "BRIDGE_LIST",
        "PERSISTENT_ONLY": "NO",
        "MARKETPLACE_ACTIONS": "export",
    }
    return {"TM_MAD": _transfer_manager(stack), "DATASTORE_MAD": datastore}


CONF = {"TM_MAD": "TM_MAD_CONF", "DATASTORE_MAD": "DS_MAD_CONF"}


def register(text: str, stack: str) -> tuple[str, list[str]]:
    """``oned.conf`` with the drivers in it, and the keys of what was added. Raises Refused: nothing is half done."""
    added = []
    for wanted in LISTS:
        found = _find_list(text, wanted)
        if found is not None and DRIVER not in _items(found.text):
            text = f"{text[: found.end]},{DRIVER}{text[found.end :]}"
            added.append(wanted.key)
    for parent, pairs in blocks(stack).items():
        text, new = _put_block(text, parent, pairs)
        added += [CONF[parent]] * new
    for name in INHERIT:
        if _own_inherit(text, name) is None:
            text = _insert(text, name, f'{name} = "{ATTRIBUTE}"')
            added.append(name)
    return text, added


def unregister(text: str, added: Iterable[str]) -> str:
    """``oned.conf`` without what ``register`` added. Raises Refused."""
    keys = set(added)
    for wanted in LISTS:
        found = _find_list(text, wanted) if wanted.key in keys else None
        if found is not None:
            text = text[: found.start] + _without(found.text, DRIVER) + text[found.end :]
    for name in (*CONF.values(), *INHERIT):
        own = _own_inherit(text, name) if name in INHERIT else _own_block(text, name)
        if own is not None and (name in keys or _marked(text, own)):
            text = _cut(text, own)
    return text


def differences(text: str, stack: str) -> Iterator[str]:
    """One line for each thing that oned.conf lacks. Raises Refused."""
    for wanted in LISTS:
        found = _find_list(text, wanted)
        if found is not None and DRIVER not in _items(found.text):
            yield f"{wanted.block} has no {DRIVER} in its list {wanted.options[0]}"
    for parent, pairs in blocks(stack).items():
        block = _own_block(text, CONF[parent])
        if block is None:
            yield f"there is no {CONF[parent]} of {DRIVER}"
            continue
        for key in sorted(pairs.keys() | block.pairs.keys()):
            if pairs.get(key, "") != block.get(key):
                yield f'{CONF[parent]} of {DRIVER}: {key} is "{block.get(key)}" and should be "{pairs.get(key, "")}"'
    for name in INHERIT:
        if _own_inherit(text, name) is None:
            yield f"there is no {name} of {ATTRIBUTE}"


def enable_live(text: str) -> tuple[str, list[str]]:
    """``vmm_execrc`` with live snapshots of our disks allowed, and the words that were added. Raises Refused."""
    value = _live(text)
    new = [pair for pair in LIVE_PAIRS if pair not in value.text.split()]
    joined = "".join((" " if value.text or number else "") + pair for number, pair in enumerate(new))
    return text[: value.end] + joined + text[value.end :], new


def disable_live(text: str, added: Iterable[str]) -> str:
    """``vmm_execrc`` without the words that ``enable_live`` added. Raises Refused."""
    for pair in added:
        value = _live(text)
        kept = re.sub(rf"(?:^|[ \t]){re.escape(pair)}(?=[ \t]|$)", "", value.text, count=1)
        text = text[: value.start] + kept + text[value.end :]
    return text


def _live(text: str) -> Value:
    found = list(re.finditer(rf'(?m)^[ \t]*{LIVE}="([^"\n$`\\]*)"[ \t]*\r?$', text))
    if len(found) != 1 or len(re.findall(rf"(?m)^[ \t]*(?:export[ \t]+)?{LIVE}\b", text)) != 1:
        raise Refused(f'there should be one line {LIVE}="…"')
    return Value(found[0][1], found[0].start(1), found[0].end(1))


def _of_driver(text: str, block: str, executable: str) -> Attribute:
    """The block that starts a driver process. Raises Refused if there is none, or more than one."""
    found = [a for a in attributes(text) if a.name == block and a.get("EXECUTABLE").rpartition("/")[2] == executable]
    if len(found) != 1:
        raise Refused(f"there should be one {block} with the executable {executable}; there are {len(found)}")
    return found[0]


def _find_list(text: str, wanted: DriverList) -> Value | None:
    """Where the list stands, or None: without the option all drivers are taken. Raises Refused."""
    block = _of_driver(text, wanted.block, wanted.executable)
    arguments = block.pairs.get("ARGUMENTS")
    if arguments is None:
        return None
    if re.search(r"[\\'\"`$]", arguments.text):
        raise BadSyntax(block.line, f"the ARGUMENTS of {wanted.block} have quotes or variables")
    found = list(_option_values(arguments, wanted.options))
    if len(found) > 1:
        raise BadSyntax(block.line, f"{wanted.block} has the option {wanted.options[0]} more than once")
    for value in found:
        rest = arguments.text[value.end - arguments.start :].lstrip()
        if not all(_items(value.text)) or rest.startswith(","):
            raise BadSyntax(block.line, f"the list {wanted.options[0]} of {wanted.block} has a gap")
    return found[0] if found else None


def _option_values(arguments: Value, options: tuple[str, str]) -> Iterator[Value]:
    """What follows ``-d``, ``--types`` or ``--types=``, or is written together with ``-d``."""
    short, long = options
    words = list(re.finditer(r"\S+", arguments.text))
    for number, word in enumerate(words):
        if word[0] in (short, long):
            if number + 1 == len(words):
                continue
            start, end = words[number + 1].span()
        elif word[0].startswith(f"{long}="):
            start, end = word.start() + len(long) + 1, word.end()
        elif word[0].startswith(short):
            start, end = word.start() + len(short), word.end()
        else:
            continue
        yield Value(arguments.text[start:end], arguments.start + start, arguments.start + end)


def _items(drivers: str) -> list[str]:
    return drivers.split(",")


def _without(drivers: str, name: str) -> str:
    return ",".join(item for item in _items(drivers) if item != name)


def _own_block(text: str, name: str) -> Attribute | None:
    found = [a for a in attributes(text) if a.name == name and a.get("NAME") == DRIVER]
    if len(found) > 1:
        raise BadSyntax(found[1].line, f"another {name} of {DRIVER}")
    return found[0] if found else None


def _put_block(text: str, parent: str, pairs: dict[str, str]) -> tuple[str, bool]:
    """The text with our block; whether it is a new one. One that is not ours and says something else is refused."""
    name, end = CONF[parent], line_end(text)
    block = _own_block(text, name)
    wanted = _block(name, pairs, end)
    if block is not None:
        if {key: value.text for key, value in block.pairs.items()} == pairs:
            return text, False
        if not _marked(text, block):
            raise BadSyntax(block.line, f"a {name} of {DRIVER} that this installer did not write says something else")
        return text[: block.start] + wanted + text[block.end :], False
    return _insert(text, name, wanted, parent), True


def _insert(text: str, name: str, wanted: str, parent: str = "") -> str:
    """The text with an attribute of ours behind the last one of its ``name``, else of ``parent``, else of all."""
    known, end = list(attributes(text)), line_end(text)
    before = ([a for a in known if a.name == name] or [a for a in known if a.name == parent] or known)[-1]
    place = text.find("\n", before.end)
    place = len(text) if place < 0 else place - (text[place - 1] == "\r")
    if not re.fullmatch(r"[ \t]*(?:#.*)?", text[before.end : place]):
        raise BadSyntax(before.line, f"something follows this {before.name} on its last line")
    return f"{text[:place]}{end}{end}{MARK}{end}{wanted}{text[place:]}"


def _own_inherit(text: str, name: str) -> Attribute | None:
    found = [a for a in attributes(text) if a.name == name and a.value is not None and a.value.text == ATTRIBUTE]
    return found[0] if found else None


def _block(name: str, pairs: dict[str, str], end: str) -> str:
    """The block, three values a line."""
    words = [f'{key} = "{value}"' for key, value in pairs.items()]
    lines = [", ".join(words[start : start + 3]) for start in range(0, len(words), 3)]
    return f"{name} = [{end}    " + f",{end}    ".join(lines) + f"{end}]"


def _marked(text: str, block: Attribute) -> bool:
    return re.search(rf"{re.escape(MARK)}[ \t]*\r?\n[ \t]*\Z", text[: block.start]) is not None


def _cut(text: str, block: Attribute) -> str:
    """Without the block, our comment, and the line ends that were put before it."""
    head = re.sub(rf"(?:{re.escape(MARK)}[ \t]*\r?\n)?[ \t]*\Z", "", text[: block.start], count=1)
    return re.sub(r"(?:\r?\n){0,2}\Z", "", head, count=1) + text[block.end :]
