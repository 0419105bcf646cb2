"""The chunk store: the process that keeps, verifies and serves the chunks of images."""
