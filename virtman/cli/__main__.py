"""``python -m virtman.cli``: the command line."""

from virtman.cli import main

main(prog_name="virtman")
