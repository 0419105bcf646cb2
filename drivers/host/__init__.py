"""The machine that drivers run on: programs, files, disk space."""
