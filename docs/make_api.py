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
from volt.coordinator import Coordinator
from volt.store import Store

TARGET = Path(__file__).parent / "api.md"
METHODS = ("get", "put", "post", "delete")


def page() -> str:
    """The whole page."""
    agent = document(create_agent_app(cast(Agent, None)))
    store = Store("sqlite://")
    coordinator = document(create_volt_app(Coordinator(store)))
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
    """One section with all operations of an OpenAPI document, and one with each object that they take or answer."""
    rows = ["| call | meaning | body | answer |", "| --- | --- | --- | --- |"]
    for path, methods in sorted(api["paths"].items()):
        for method in METHODS:
            if method in methods:
                operation = methods[method]
                told = (operation.get("summary", ""), _names(_body(operation)), _names(_answer(operation)))
                rows.append(f"| `{method.upper()} {path}` | {' | '.join(told)} |")
    yield "\n".join(rows)
    yield "What goes wrong is answered with a `Problem` (RFC 9457), in whose `type` the last word is the kind of error."
    schemas = api["components"]["schemas"]
    for name in sorted(_used(api)):
        yield "\n".join([f"**{name}**: {schemas[name].get('description', '')}", "", *_fields(schemas[name])])


def _body(operation: dict[str, Any]) -> set[str]:
    return _references(operation.get("requestBody", {}))


def _answer(operation: dict[str, Any]) -> set[str]:
    return _references([answer for status, answer in operation["responses"].items() if status.startswith("2")])


def _names(names: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _references(part: Any) -> set[str]:
    """The names of the schemas that a part of a document refers to."""
    if isinstance(part, list):
        return {name for each in part for name in _references(each)}
    if not isinstance(part, dict):
        return set()
    here = {part["$ref"].rpartition("/")[2]} if isinstance(part.get("$ref"), str) else set()
    return here | _references(list(part.values()))


def _used(api: dict[str, Any]) -> set[str]:
    """All schemas that operations take or answer, and those in them; problems are described in ``errors.py``."""
    operations = [op for methods in api["paths"].values() for key, op in methods.items() if key in METHODS]
    found: set[str] = set()
    new = {name for operation in operations for name in _body(operation) | _answer(operation)}
    while new:
        found |= new
        new = {ref for name in new for ref in _references(api["components"]["schemas"][name])} - found
    return found


def _fields(schema: dict[str, Any]) -> Iterator[str]:
    required = schema.get("required", [])
    for name, field in schema.get("properties", {}).items():
        kinds = [field, *field.get("anyOf", [])]
        need = "required" if name in required else f"default {field.get('default')!r}"
        description = next((k["description"] for k in kinds if k.get("description")), "")
        yield f"- `{name}` ({_kind(field)}, {need}){': ' + description if description else ''}"


def _kind(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(map(_kind, field["anyOf"]))
    if field.get("type") == "array":
        return f"list of {_kind(field['items'])}"
    return str(field.get("type") or ", ".join(_references(field)) or "object")


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
