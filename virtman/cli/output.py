"""What commands print: answers as JSON or for people, lines of errors, tables, progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click

from virtman.errors import NotFound, VirtmanError

NOT_FOUND = 3
"""The exit code if what was named is not there; 1 is for other errors, 2 for those of the command line."""


class Failure(click.ClickException):
    """One line on stderr and an exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        vars(self)["exit_code"] = code  # click declares it as one for all

    def show(self, file: Any = None) -> None:
        """Print the line."""
        click.echo(f"virtman: {self.format_message()}", file=file, err=True)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Errors of ours as one line and an exit code."""
    try:
        yield
    except VirtmanError as error:
        said = "; ".join([str(error), *getattr(error, "__notes__", [])])
        raise Failure(" ".join(said.split()), NOT_FOUND if isinstance(error, NotFound) else 1) from error


@dataclass(frozen=True)
class Answer:
    """What a command has to say. ``value``, for scripts: a model, a list of models, or what JSON has.

    ``text``, for people: a line, a function that prints, or nothing. ``err``: all goes to the standard error.
    ``code``: the exit code.
    """

    value: Any
    text: str | Callable[[], None] = ""
    err: bool = False
    code: int = 0

    def show(self, *, as_json: bool) -> None:
        """Print the value or the text, and end the command if there is a code."""
        if as_json:
            text = json.dumps(self.value, indent=2, default=lambda model: model.model_dump(mode="json"))
            click.echo(text, err=self.err)
        elif callable(self.text):
            self.text()
        elif self.text:
            click.echo(self.text, err=self.err)
        if self.code:
            sys.exit(self.code)


def fields(rows: Sequence[Sequence[Any]]) -> None:
    """Print a line for each name and value."""
    longest = max(len(name) for name, _ in rows)
    for name, value in rows:
        click.echo(f"{name:{longest}}  {value}")


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show on the terminal how far each step is, by calls with the step, the bytes done and the bytes in all."""
    if not sys.stderr.isatty():
        yield lambda _step, _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    amount = DownloadColumn(binary_units=True)
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def show(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bar.add_task(step, total=total)
            bar.update(tasks[step], completed=done, total=total)

        yield show
