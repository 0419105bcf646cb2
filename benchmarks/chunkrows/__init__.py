"""The rows of ``benchmarks.chunkstore``: each module measures one, and returns its lines of the table."""
