# `make demo` serves a real model from an object store on this machine, `make test` runs every test.
# Both make their environment first, outside the checkout; tools/environment.py says where and of what.

PYTHON ?= python3
# Which tests: make test T=tests/unit, make test T="-k index"
T ?=
# Prints the folder of the demo's model, made unless it is there.
PREPARE_MODEL = import sys; from headrace.cli.demo_model import prepare_model; from headrace.settings import Settings; print(prepare_model(Settings.from_environment().cache_dir, lambda text: print(text, file=sys.stderr)))

# The checkout comes before anything installed, so that two checkouts can share an environment.
RUN = set -e; environment="$$($(PYTHON) tools/environment.py)"; PATH="$$environment/bin:$$PATH" PYTHONPATH="$(CURDIR)/src" "$$environment/bin/python"

.PHONY: help demo test test-vllm test-sglang lint types format bench env

help:
	@echo "make demo     serve a small model from an object store, ask it a question, show what loading took"
	@echo "make test     run the tests (T=tests/unit for some of them)"
	@echo "make test-vllm  run the tests with vLLM, in its own environment"
	@echo "make test-sglang  run the tests with SGLang, in its own environment"
	@echo "make lint     check style and formatting"
	@echo "make types    check types"
	@echo "make format   put the code in the project's format"
	@echo "make bench    measure loading against other loaders"
	@echo "make env      make the environment, and print where it is"

demo:
	@$(RUN) -m headrace demo

test:
	@$(RUN) -m pytest $(T)

# vLLM finds its plug-ins by the entry points of installed packages, so the checkout is installed, for this run alone. The real model is made with the
# development environment, whose Transformers reads it.
test-vllm:
	@set -e; environment="$$($(PYTHON) tools/vllm_environment.py)"; installed="$$(mktemp -d)"; trap 'rm -rf "$$installed"' EXIT; \
	$(PYTHON) tools/vllm_environment.py --install "$$installed" > /dev/null; \
	SMOLLM2_FOLDER="$$($(RUN) -c "$(PREPARE_MODEL)")"; export SMOLLM2_FOLDER; \
	PATH="$$environment/bin:$$PATH" PYTHONPATH="$$installed" "$$environment/bin/python" -m pytest $(or $(T),tests/vllm)

# As with vLLM.
test-sglang:
	@set -e; environment="$$($(PYTHON) tools/sglang_environment.py)"; installed="$$(mktemp -d)"; trap 'rm -rf "$$installed"' EXIT; \
	$(PYTHON) tools/sglang_environment.py --install "$$installed" > /dev/null; \
	SMOLLM2_FOLDER="$$($(RUN) -c "$(PREPARE_MODEL)")"; export SMOLLM2_FOLDER; \
	PATH="$$environment/bin:$$PATH" PYTHONPATH="$$installed" "$$environment/bin/python" -m pytest $(or $(T),tests/sglang)

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
