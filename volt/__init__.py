"""Volt, the coordinator: arranges the hosts of each image in a tree and tells them their parents."""
