"""Whether an application answers as its OpenAPI document says."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from flask import Flask, Response, request

TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "number": (int, float),
    "boolean": (bool,), "null": (type(None),),
}  # fmt: skip
SAID_ONLY = {"title", "description", "default", "format"}
"""What a schema says for people, or to writers of requests."""


class Contract:
    """Holds every answer of ``app`` against its document; ``broken`` tells where one differs."""

    def __init__(self, app: Flask) -> None:
        self.broken: list[str] = []
        self.document: dict[str, Any] = {"paths": {}}
        app.after_request(self._check)
        self.document = app.test_client().get("/openapi.json").get_json()

    def _check(self, response: Response) -> Response:
        rule = request.url_rule.rule.replace("<", "{").replace(">", "}") if request.url_rule else None
        operation = self.document["paths"].get(rule, {}).get(request.method.lower())
        if operation is None and response.status_code < 400:
            return response  # the document itself
        where = f"{request.method} {request.path}: {response.status_code}"
        answers = (operation or next(iter(self.document["paths"]["/v1/status"].values())))["responses"]
        answer = answers.get(str(response.status_code)) or answers["default"]
        content = answer.get("content", {})
        if not content:
            self._say(where, [] if not response.get_data() else ["has a body"])
        elif response.mimetype not in content:
            self._say(where, [f"is {response.mimetype}, not {', '.join(content)}"])
        elif response.is_streamed:
            response.response = self._watched(where, content[response.mimetype]["schema"], response.response)
        else:
            self._say(where, self.differences(content[response.mimetype]["schema"], response.get_json(force=True)))
        return response

    def _watched(self, where: str, schema: dict[str, Any], lines: Iterable[Any]) -> Iterator[Any]:
        for line in lines:
            self._say(where, self.differences(schema, json.loads(line)))
            yield line

    def _say(self, where: str, differences: Iterable[str]) -> None:
        self.broken += [f"{where}: {difference}" for difference in differences]

    def differences(self, schema: dict[str, Any], value: Any, at: str = "answer") -> Iterator[str]:
        """Where a value is not what a schema says, nor more than it says."""
        if "$ref" in schema:
            schema = self.document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        if "anyOf" in schema:
            kinds = [list(self.differences(kind, value, at)) for kind in schema["anyOf"]]
            yield from () if [] in kinds else [text for kind in kinds for text in kind]
            return
        unknown = set(schema) - SAID_ONLY - {
            "type", "properties", "required", "additionalProperties", "items", "enum", "minimum",
        }  # fmt: skip
        assert not unknown, f"this check has to learn {unknown}"
        expected = TYPES[schema["type"]]
        if not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected):
            yield f"{at} is {value!r}, no {schema['type']}"
        elif isinstance(value, dict):
            yield from self._of_object(schema, value, at)
        elif isinstance(value, list):
            yield from (
                text for n, each in enumerate(value) for text in self.differences(schema["items"], each, f"{at}.{n}")
            )
        elif value not in schema.get("enum", [value]) or (
            isinstance(value, int) and value < schema.get("minimum", value)
        ):
            yield f"{at} is {value!r}"

    def _of_object(self, schema: dict[str, Any], value: dict[str, Any], at: str) -> Iterator[str]:
        properties = schema.get("properties")
        if properties is None:
            return
        yield from (f"{at}.{name} is missing" for name in schema.get("required", ()) if name not in value)
        for name, each in value.items():
            if name in properties:
                yield from self.differences(properties[name], each, f"{at}.{name}")
            else:
                yield f"{at}.{name} is not in the document"
