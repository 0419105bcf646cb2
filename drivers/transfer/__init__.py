"""Methods by which whole images travel to many hosts at once: a file for each."""
