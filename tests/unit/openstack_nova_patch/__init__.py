"""Tests of openstack_nova_patch."""
