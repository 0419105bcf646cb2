"""The machine's own package sources, as far as they are Debian's: what guests are built from, of any release."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lab.errors import NoPackageSources
from lab.tools import run

APT = Path("/etc/apt")


@dataclass(frozen=True)
class Source:
    """One repository, as in sources.list(5).

    ``signed_by`` is the path of a keyring, a key block, or empty for apt's own keyrings.
    """

    uri: str
    suite: str
    components: str
    signed_by: str = ""

    def deb822(self) -> str:
        """The entry in deb822 style."""
        lines = ["Types: deb", f"URIs: {self.uri}", f"Suites: {self.suite}", f"Components: {self.components}"]
        if self.signed_by:
            lines.append(f"Signed-By: {self.signed_by}")
        return "\n".join(lines) + "\n"


def parse_list(text: str) -> Iterator[Source]:
    """The ``deb`` lines of a sources.list in one-line style."""
    for line in text.splitlines():
        entry = re.match(r"\s*deb\s+(?:\[(?P<options>[^\]]*)\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)(?P<rest>[^#]*)", line)
        if entry:
            signed_by = re.search(r"signed-by=(\S+)", entry["options"] or "", re.IGNORECASE)
            yield Source(entry["uri"], entry["suite"], entry["rest"].strip(), signed_by[1] if signed_by else "")


def parse_deb822(text: str) -> Iterator[Source]:
    """The stanzas of a .sources file. A stanza with ``Enabled: no`` or without ``deb`` among its types is left out."""
    without_comments = re.sub(r"(?m)^#.*\n?", "", text)
    for stanza in re.split(r"\n\s*\n", without_comments):
        fields = {
            name.lower(): value.strip() for name, value in re.findall(r"(?m)^([\w-]+):(.*(?:\n[ \t].*)*)", stanza)
        }
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() in {"no", "false", "0"}:
            continue
        for uri in fields.get("uris", "").split():
            for suite in fields.get("suites", "").split():
                yield Source(uri, suite, fields.get("components", ""), fields.get("signed-by", ""))


def configured(apt: Path = APT) -> Iterator[Source]:
    """Every enabled binary repository of the machine."""
    for path in (apt / "sources.list", *sorted(apt.glob("sources.list.d/*"))):
        if path.is_file() and path.suffix in {".list", ".sources"}:
            parse = parse_deb822 if path.suffix == ".sources" else parse_list
            yield from parse(path.read_text())


def codename() -> str:
    """The running Debian release: VERSION_CODENAME of os-release(5)."""
    release: dict[str, str] = dict(re.findall(r'(?m)^(\w+)="?([^"\n]*)"?$', Path("/etc/os-release").read_text()))
    return release["VERSION_CODENAME"]


def debian(sources: Iterable[Source], suite: str, origins: set[tuple[str, str]]) -> list[Source]:
    """The entries that carry ``suite``, its updates and its security fixes, and that Debian itself publishes.

    ``origins`` holds (URI, suite) of the repositories whose signed Release file names Debian as their origin.
    """
    suites = {suite, f"{suite}-updates", f"{suite}-security"}
    return [s for s in sources if s.suite in suites and (s.uri.rstrip("/"), s.suite) in origins]


def published_by_debian() -> set[tuple[str, str]]:
    """(URI, suite) of the repositories whose Release file, as last fetched by apt, names Debian as their origin."""
    fields = run(
        ["apt-get", "indextargets", "--format", "$(ORIGIN)|$(REPO_URI)|$(RELEASE)", "Created-By: Packages"]
    ).splitlines()
    rows = (line.split("|") for line in fields)
    return {(uri.rstrip("/"), suite) for origin, uri, suite in rows if origin == "Debian"}


def of_release(sources: Iterable[Source], running: str, suite: str) -> list[Source]:
    """The entries of the running release, its updates and its security fixes, as another release has them."""
    return [replace(source, suite=suite + source.suite.removeprefix(running)) for source in sources]


def debian_sources(suite: str) -> list[Source]:
    """What to build a guest of a release from: the running release's sources with the other name, if it is another.

    Raises NoPackageSources if this machine has none. Whether they hold that release is not known before they are asked.
    """
    running = codename()
    found = debian(configured(), running, published_by_debian())
    if not found:
        # The lists may have been removed after the last update, as container images do.
        run(["apt-get", "update"])
        found = debian(configured(), running, published_by_debian())
    if not any(source.suite == running for source in found):
        raise NoPackageSources(f"apt has no source of Debian {running}: see /etc/apt/sources.list and sources.list.d")
    return of_release(found, running, suite)
