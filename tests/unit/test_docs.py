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
from volt.coordinator import Coordinator, Policy
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
        self.assert_has_calls(create_volt_app(Coordinator(store, Policy())))

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


class LinksTest(TestCase):
    def test_every_local_link_leads_to_a_file(self) -> None:
        for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
            for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
                self.assertTrue((document.parent / target).exists(), f"{document}: {target}")
