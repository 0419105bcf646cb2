"""Drivers: how a host reaches its parents, keeps what it reads, serves its children and gives a VM a disk."""
