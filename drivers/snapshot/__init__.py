"""How one VM gets a private writable disk."""
