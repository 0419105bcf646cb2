"""The parts of the benchmark of deployments."""
