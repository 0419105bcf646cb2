"""QEMU's programs and files."""
