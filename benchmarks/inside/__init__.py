"""Programs that the benchmarks of the kernel stack run in the lab's guests: ``python3 -m benchmarks.inside.NAME``."""
