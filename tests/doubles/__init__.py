"""Test doubles behind the Protocols of the project: they keep their state in memory and do what the contract says."""
