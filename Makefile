# make demo         boot real VMs through a tree of hosts on this machine; HOSTS=4 VMS=8 choose the size
# make demo-kernel  the kernel stack: guests with Debian's kernel, a VM booted in one of them; SUITE=trixie: with Debian 13's
# make test         what CI runs: lint, unit, userspace, boot, openstack, kernel, coverage. ENV=kernel: only that of them
# make test-whole   all tests: every step of each sweep, the long ones, and guests of Debian 13 too: hours. ENV=kernel as above
# make test-13      the kernel environment of make test-whole in guests of Debian 13
# make check        lint, unit and userspace tests, one boot: while you work
# make lint         style and types only
# make clean        remove what was built, installed Debian packages excepted

HOSTS ?= 4
VMS ?= 8
SUITE ?=
ENV ?=
RESULTS = build/results
comma := ,

# Run environments of tox ($(1): options that choose them) to their end, whatever fails, and say what came of them.
define tests
	rm -rf .coverage .coverage.* $(RESULTS)
	mkdir -p $(RESULTS)
	-.venv/bin/tox run-parallel --parallel-live --result-json $(RESULTS)/tox.json $(1)
	.venv/bin/python -m tests.summary $(RESULTS)
endef

.PHONY: demo demo-kernel test test-whole test-13 check lint clean bootstrap

demo: bootstrap
	.venv/bin/python -m lab.demo --hosts $(HOSTS) --vms $(VMS)

demo-kernel: bootstrap
	.venv/bin/python -m lab.kernel.demo --suite "$(SUITE)"

test: bootstrap
	$(call tests,--parallel 3 $(if $(ENV),-e $(ENV)))

test-whole test-13: export WHOLE = 1
test-whole: bootstrap
	$(call tests,--parallel 2 -e $(or $(ENV),lint$(comma)unit$(comma)userspace$(comma)boot$(comma)openstack$(comma)kernel$(comma)kernel-13$(comma)coverage))

test-13: bootstrap
	$(call tests,-e kernel-13)

check: bootstrap
	$(call tests,--parallel 2 -e lint$(comma)unit$(comma)userspace$(comma)boot)

lint: bootstrap
	.venv/bin/tox run -e lint

bootstrap:
	@lab/bootstrap

clean:
	rm -rf build chunkd/target .venv .tox .coverage .coverage.* *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
