# `make demo` serves a real model from an object store on this machine, `make test` runs every test.
# Both make their environment first, outside the checkout; tools/environment.py says where and of what.

PYTHON ?= python3
# Which tests: make test T=tests/unit, make test T="-k index"
T ?=
# The checkout comes before anything installed, so that two checkouts can share an environment.
RUN = set -e; environment="$$($(PYTHON) tools/environment.py)"; PATH="$$environment/bin:$$PATH" PYTHONPATH="$(CURDIR)/src" "$$environment/bin/python"

.PHONY: help demo test lint types format bench env

help:
	@echo "make demo     serve a small model from an object store, ask it a question, show what loading took"
	@echo "make test     run the tests (T=tests/unit for some of them)"
	@echo "make lint     check style and formatting"
	@echo "make types    check types"
	@echo "make format   put the code in the project's format"
	@echo "make bench    measure loading against other loaders"
	@echo "make env      make the environment, and print where it is"

demo:
	@$(RUN) -m headrace demo

test:
	@$(RUN) -m pytest $(T)

lint:
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .

types:
	@$(RUN) -m mypy

format:
	@$(RUN) -m ruff format .
	@$(RUN) -m ruff check --fix .

bench:
	@$(RUN) benchmarks/stream.py

env:
	@$(PYTHON) tools/environment.py
