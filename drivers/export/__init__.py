"""How a host serves its children."""
