"""How long tests that start programs wait. Guests of the kernel lab import it, too."""

PATIENCE = 600.0
"""Seconds after which something is taken for one that hangs. No test is decided by how fast anything is: what takes a
second on an idle machine took fifty in a whole run on a busy one."""
