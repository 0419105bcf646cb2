"""Tests with an installed Nova: python -m tests.openstack, in the environment of lab/openstack-venv."""
