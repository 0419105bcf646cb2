"""The OpenNebula drivers, as far as they need no host."""
