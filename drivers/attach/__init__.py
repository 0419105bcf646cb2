"""How a host reaches its parents."""
