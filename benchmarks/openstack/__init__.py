"""What ``benchmarks.nova`` runs in the environment of lab/openstack-venv, with Nova and Cinder."""
