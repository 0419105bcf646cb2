"""Writes docs/api.md, the reference of the HTTP APIs and the commands, from the code: python docs/make_api.py"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import click
from flask import Flask

from virtman.agent import Agent
from virtman.api import create_app as create_agent_app
from virtman.cli import main as virtman
from volt.api import create_app as create_volt_app
from volt.cli import main as volt
from volt.coordinator import Coordinator, Policy
from volt.store import Store

TARGET = Path(__file__).parent / "api.md"
METHODS = ("get", "put", "post", "delete")


def page() -> str:
    """The whole page."""
    agent = document(create_agent_app(cast(Agent, None)))
    store = Store("sqlite://")
    coordinator = document(create_volt_app(Coordinator(store, Policy())))
    store.close()
    parts = [
        "# API reference",
        "Made from the code by `docs/make_api.py`; the APIs serve the same as OpenAPI documents at `/openapi.json`.",
        "The contract of the drivers is `drivers/base.py`.",
        "## Volt: REST API",
        *operations(coordinator),
        "## Agent: local API, on its unix socket",
        *operations(agent),
        "## Commands",
        *commands("virtman", virtman),
        *commands("volt", volt),
    ]
    return "\n\n".join(parts) + "\n"


def document(app: Flask) -> dict[str, Any]:
    """The OpenAPI document that an application serves."""
    answer: dict[str, Any] = app.test_client().get("/openapi.json").get_json()
    return answer


def operations(api: dict[str, Any]) -> Iterator[str]:
    """One section with all operations of an OpenAPI document, and one with the bodies they take."""
    rows = ["| call | meaning | body |", "| --- | --- | --- |"]
    for path, methods in sorted(api["paths"].items()):
        for method in METHODS:
            if method in methods:
                operation = methods[method]
                rows.append(f"| `{method.upper()} {path}` | {operation.get('summary', '')} | {_body(operation)} |")
    yield "\n".join(rows)
    schemas = api["components"]["schemas"]
    for name in sorted(_bodies(api)):
        yield "\n".join([f"**{name}**: {schemas[name].get('description', '')}", "", *_fields(schemas[name])])


def _body(operation: dict[str, Any]) -> str:
    content = operation.get("requestBody", {}).get("content", {})
    return ", ".join(f"`{media['schema']['$ref'].rpartition('/')[2]}`" for media in content.values())


def _bodies(api: dict[str, Any]) -> set[str]:
    operations = [op for methods in api["paths"].values() for key, op in methods.items() if key in METHODS]
    return {_body(operation).strip("`") for operation in operations} - {""}


def _fields(schema: dict[str, Any]) -> Iterator[str]:
    required = schema.get("required", [])
    for name, field in schema["properties"].items():
        kinds = [field, *field.get("anyOf", [])]
        kind = " or ".join(k["type"] for k in kinds if "type" in k) or "object"
        need = "required" if name in required else f"default {field.get('default')!r}"
        description = next((k["description"] for k in kinds if k.get("description")), "")
        yield f"- `{name}` ({kind}, {need}){': ' + description if description else ''}"


def commands(name: str, command: click.Command) -> Iterator[str]:
    """The help of a command and of its subcommands."""
    context = click.Context(command, info_name=name)
    yield f"### {name}\n\n```\n{command.get_help(context)}\n```"
    if isinstance(command, click.Group):
        for sub in command.list_commands(context):
            child = command.get_command(context, sub)
            assert child is not None  # noqa: S101  it is in the list
            yield from commands(f"{name} {sub}", child)


if __name__ == "__main__":
    TARGET.write_text(page())
