"""The documents keep up with the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import click
from testtools import TestCase

from virtman.agent import Agent
from virtman.api import create_app as create_agent_app
from virtman.cli import main as virtman
from volt.api import create_app as create_volt_app
from volt.cli import main as volt
from volt.coordinator import Coordinator
from volt.store import Store

ROOT = Path(__file__).parents[2]


class ApiReferenceTest(TestCase):
    """docs/api.md is made by docs/make_api.py; only what must be in it is compared, not how libraries print it."""

    def setUp(self) -> None:
        super().setUp()
        self.page = (ROOT / "docs" / "api.md").read_text()

    def test_has_every_call_of_the_agent(self) -> None:
        self.assert_has_calls(create_agent_app(cast(Agent, None)))

    def test_has_every_call_of_volt(self) -> None:
        store = Store("sqlite://")
        self.addCleanup(store.close)
        self.assert_has_calls(create_volt_app(Coordinator(store)))

    def assert_has_calls(self, app) -> None:  # type: ignore[no-untyped-def]
        paths = app.test_client().get("/openapi.json").get_json()["paths"]
        self.assertTrue(paths)
        for path, methods in paths.items():
            for method in methods.keys() & {"get", "put", "post", "delete"}:
                self.assertIn(f"`{method.upper()} {path}`", self.page)

    def test_has_every_option_of_every_command(self) -> None:
        for name, group in (("virtman", virtman), ("volt", volt)):
            self.assert_has_command(name, group)

    def assert_has_command(self, name: str, command: click.Command) -> None:
        section = self.page.partition(f"### {name}\n")[2].partition("\n### ")[0]
        self.assertTrue(section, name)
        for option in (option for parameter in command.params for option in parameter.opts):
            if option.startswith("--"):
                self.assertIn(option, section)
        for child, sub in getattr(command, "commands", {}).items():
            self.assert_has_command(f"{name} {child}", sub)


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LONGEST_PARAGRAPH = 90
"""Words."""


class LinksTest(TestCase):
    def test_every_local_link_leads_to_a_heading_of_a_file(self) -> None:
        for document in DOCUMENTS:
            for target, _, anchor in re.findall(r"\]\(([^)#:]*)(#([^)]+))?\)", document.read_text()):
                file = document.parent / target if target else document
                self.assertTrue(file.exists(), f"{document}: {target}")
                if anchor:
                    self.assertIn(anchor, anchors(file.read_text()), f"{document}: {target}")


class ParagraphsTest(TestCase):
    def test_no_paragraph_is_too_long_to_read_once(self) -> None:
        for document in DOCUMENTS:
            for paragraph in paragraphs(document.read_text()):
                self.assertLessEqual(len(paragraph.split()), LONGEST_PARAGRAPH, f"{document}: {paragraph}")


def anchors(text: str) -> set[str]:
    """The names by which links lead to headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def paragraphs(text: str) -> list[str]:
    """What is neither code nor a table nor a heading; each item of a list is a paragraph."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    text = re.sub(r"^ *(\||#|    ).*$", "", text, flags=re.M)
    return re.split(r"\n\s*\n|\n *(?:[-*]|\d+\.) ", text)
