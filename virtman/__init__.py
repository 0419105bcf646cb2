"""The agent on each host: library, command line and local API."""
