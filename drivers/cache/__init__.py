"""How a host keeps what it has read."""
