"""What every implementation of a contract has to do: bodies of tests, for test cases that bring one."""
