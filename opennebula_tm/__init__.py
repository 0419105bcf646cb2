"""VirtMan for OpenNebula: a transfer manager and a datastore driver that boot VMs from the tree.

What runs on the front end uses nothing but Python's standard library, and nothing of the rest of this project: it calls
``virtman`` on the hosts, by ssh.
"""
