"""The chunk store: one process of a host keeps, verifies and serves the chunks of all images (docs/chunkstore.md)."""
