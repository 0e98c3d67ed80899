# pgmq-supervisor: `make` explains itself.
#
# Everything runs inside .venv, which `make install` makes and refreshes; nothing outside this folder is touched.
# A target that needs the package depends on `install`, so `make demo` and `make test` work on a bare checkout.

SHELL := /bin/sh
.DEFAULT_GOAL := help

# Choose another interpreter with `make install PYTHON=/path/to/python`.
PYTHON ?=
export PYTHON
PY := .venv/bin/python
STAMP := .venv/.installed

SEED ?=
RUNS ?=
ARGS ?=

# Most tests wait most of the time. 0: all in one process, as a debugger needs it.
WORKERS ?= 3

# The stamp names the folder that it was made in: a checkout that was moved or copied has to be installed again, and so
# has one for which another PYTHON is asked for.
VERSION := -c 'import sys; print(sys.version_info[:2])'
INSTALLED_HERE := $(shell [ -f $(STAMP) ] && [ "$$(cat $(STAMP))" = "$$(pwd -P)" ] && \
	version=$$($(PY) $(VERSION) 2>/dev/null) && \
	{ [ -z "$(PYTHON)" ] || [ "$$("$(PYTHON)" $(VERSION) 2>/dev/null)" = "$$version" ]; } && echo yes)
ifneq ($(INSTALLED_HERE),yes)
$(STAMP): always
endif

.PHONY: help install demo test unit lint format sim crash bench soak mutants matrix pythons docs clean always

help: ## list the targets
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  variables: PYTHON=interpreter  SEED=n RUNS=n (sim, crash)  WORKERS=n (test)  ARGS='more arguments'"

install: $(STAMP) ## make or refresh .venv with the package in editable mode and the tools

# A name on PATH may be a shim that does not run, or a Python without ensurepip or ssl: each candidate is tried.
$(STAMP): pyproject.toml
	@set -eu; umask 022; \
	usable() { "$$1" -c 'import sys, ssl, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }; \
	chosen=; \
	if [ -n "$${PYTHON:-}" ]; then set -- "$$PYTHON"; else set -- python3.13 python3.12 python3.11 python3 python3.14; fi; \
	for candidate in "$$@"; do \
		if usable "$$candidate"; then chosen=$$candidate; break; fi; \
	done; \
	if [ -z "$$chosen" ]; then \
		echo "No usable Python: 3.11 or newer with the modules venv, ensurepip and ssl is needed." >&2; \
		echo "Tried: $$*" >&2; \
		echo "Debian: apt-get install python3-venv. Elsewhere: make install PYTHON=/path/to/python" >&2; \
		exit 1; \
	fi; \
	version=$$("$$chosen" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	present=$$($(PY) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true); \
	prefix=$$($(PY) -c 'import sys; print(sys.prefix)' 2>/dev/null || true); \
	if [ "$$present" != "$$version" ] || [ "$$prefix" != "$$(pwd -P)/.venv" ]; then \
		echo "making .venv with Python $$version"; \
		"$$chosen" -m venv --clear .venv; \
	fi; \
	rm -f $(STAMP); \
	echo "installing into .venv"; \
	$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[dev]'; \
	pwd -P > $(STAMP)

always:

demo: install ## good, slow, flaky, crashing and hanging messages on an embedded database, with a live view
	@$(PY) -m supervisor demo $(ARGS)

test: install ## every test, on embedded databases
	@$(PY) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

unit: install ## the fast tests only: no database, no processes
	@$(PY) -m pytest tests/unit $(ARGS)

lint: install ## ruff, mypy --strict, import contracts
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(PY) -c 'import sys; from importlinter.cli import lint_imports_command; sys.argv[0] = "lint-imports"; lint_imports_command()'

format: install ## let ruff mend what it can
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

sim: install ## the core in a seeded simulated world (SEED=n RUNS=n)
	@$(PY) -m tests.simulation $(if $(SEED),--seed $(SEED)) $(if $(RUNS),--runs $(RUNS)) $(ARGS)

crash: install ## kill parent, child and both at every kill point, and more; writes docs/verification.md (SEED=n RUNS=n)
	@$(PY) -m crashtests all --report docs/verification.md $(if $(SEED),--seed $(SEED)) $(if $(RUNS),--runs $(RUNS)) $(ARGS)

bench: install ## throughput and latency against a bare PGMQ loop
	@$(PY) -m tests.bench $(ARGS)

soak: install ## long outages and ledgers, 500 random stories, a thousand deaths with a watch for leaks (SEED=n RUNS=n)
	@status=0; \
	SUPERVISOR_TEST_SOAK=1 $(PY) -m pytest tests/e2e -m soak || status=$$?; \
	$(PY) -m crashtests soak --report docs/verification.md $(if $(SEED),--seed $(SEED)) $(if $(RUNS),--runs $(RUNS)) $(ARGS) || status=$$?; \
	exit $$status

mutants: install ## deliberate faults in the guards: each must be caught by some test
	@$(PY) -m tests.mutation --report docs/verification.md $(ARGS)

matrix: install ## the integration tests on PostgreSQL 14 to 18 with PGMQ 1.11 and 1.13
	@$(PY) -m tests.matrix $(ARGS)

pythons: ## every test under each Python that is here
	@set -eu; ran=; \
	if [ -n "$${PYTHON:-}" ]; then set -- "$$PYTHON"; else set -- python3.11 python3.12 python3.13; fi; \
	for python in "$$@"; do \
		if "$$python" -c 'import ssl, venv, ensurepip' >/dev/null 2>&1; then \
			echo "== $$python"; ran=yes; \
			work=$$(mktemp -d "$${TMPDIR:-/tmp}/pgmq-supervisor-pythons.XXXXXX"); chmod 755 "$$work"; \
			git ls-files -z --cached --others --exclude-standard | tar --null --files-from=- -cf - | tar -xf - -C "$$work"; \
			status=0; $(MAKE) --no-print-directory -C "$$work" test PYTHON="$$python" || status=$$?; \
			rm -rf "$$work"; [ "$$status" = 0 ] || exit "$$status"; \
		else echo "== $$python: not run, it is not here"; fi; \
	done; [ -n "$$ran" ]

docs: install ## draw the diagrams from the code, and build the documentation into site/
	@$(PY) -m tests.tools.diagrams
	@$(PY) -c 'import material' 2>/dev/null || \
		{ echo "installing mkdocs into .venv"; $(PY) -m pip install --quiet --disable-pip-version-check --editable '.[docs]'; }
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet $(ARGS)
	@echo "built: site/index.html"

clean: ## remove .venv and caches (data of the embedded server stays)
	@rm -rf .venv build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
