"""Nova's servers on disks of VirtMan, and their volumes through its cache. openstack_nova_patch puts this here."""
