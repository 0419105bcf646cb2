"""For whoever runs pytest over all tests: these need another environment and runner, see __main__.py."""

collect_ignore_glob = ["test_*.py"]
