# make demo         boot real VMs through a tree of hosts on this machine; HOSTS=4 VMS=8 choose the size
# make demo-kernel  the kernel stack: guests with Debian's kernel, a VM booted in one of them; SUITE=trixie: with Debian 13's
# make test         everything that CI runs: lint, unit, userspace, boot, openstack, kernel and drivers' tests, coverage
# make test-whole   the same, with each step of every sweep and the long tests (tests/sweeps.py): hours
# make test-13      what runs in guests, the kernel stack and its drivers, in guests of Debian 13
# make check        lint, unit and userspace tests, one boot, one test of each driver: while you work
# make defects      put hand-made defects into a copy, one by one, and see that unit tests notice them: many minutes
# make lint         style and types only
# make clean        remove what was built, installed Debian packages excepted

HOSTS ?= 4
VMS ?= 8
SUITE ?=

# What failed is said once more at the end of a run.
FAILURES = $(CURDIR)/.failures
test test-13 check: export FAILURES := $(FAILURES)

.PHONY: demo demo-kernel test test-whole test-13 check defects lint clean bootstrap

demo: bootstrap
	.venv/bin/python -m lab.demo --hosts $(HOSTS) --vms $(VMS)

demo-kernel: bootstrap
	.venv/bin/python -m lab.kernel.demo --suite "$(SUITE)"

test: bootstrap
	rm -f .coverage .coverage.* $(FAILURES)
	.venv/bin/tox run-parallel --parallel 5 --parallel-live || .venv/bin/python -m tests.failures

test-whole:
	WHOLE=1 $(MAKE) test

test-13: bootstrap
	rm -f $(FAILURES)
	SUITE=trixie .venv/bin/tox run-parallel --parallel 2 --parallel-live -e kernel,drivers || \
	    .venv/bin/python -m tests.failures
	rm -f .coverage .coverage.*

check: bootstrap
	rm -f $(FAILURES)
	ROUNDS=3 .venv/bin/tox run-parallel --parallel 3 --parallel-live -e lint,unit,userspace,smoke || \
	    .venv/bin/python -m tests.failures
	rm -f .coverage .coverage.*

defects: bootstrap
	.venv/bin/python -m tests.defects

lint: bootstrap
	.venv/bin/tox run -e lint

bootstrap:
	@lab/bootstrap

clean:
	rm -rf build .venv .tox .coverage .coverage.* *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis $(FAILURES)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
