# `make demo` installs what it runs, training and serving included; the other targets install the developers' tools into the same .venv.

PYTHON ?= python3
BIN := .venv/bin
FOLDERS := $(patsubst %/__init__.py,%,$(wildcard */__init__.py))

.PHONY: demo test test-ray test-vllm lint bench bench-vllm fuzz soak clean

demo: .venv/installed-eval,train,serve
	$(BIN)/fleetpilot demo --train

test: .venv/installed-dev
	$(BIN)/pytest

# The dispatcher in front of real vLLM: an environment of 3.7 GB, and two engines on two cores.
test-vllm: .venv/installed-dev .venv-vllm/installed
	$(BIN)/pytest -m vllm tests/vllm

# evaluate and train --backend ray, with Ray on this machine.
test-ray: .venv/installed-dev .venv/installed-ray
	$(BIN)/pytest -m ray tests/evaluation tests/training

lint: .venv/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	rm -rf build/typed && mkdir -p build/typed/fleetpilot
	ln -s $(addprefix ../../../,$(wildcard src/fleetpilot/*) $(FOLDERS)) build/typed/fleetpilot/
	$(BIN)/mypy

bench: .venv/installed-dev
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

# They start their own engines, and want a quiet machine.
bench-vllm: .venv/installed-dev .venv-vllm/installed
	for script in benchmarks/vllm/[a-z]*.py; do $(BIN)/python $$script || exit 1; done

# Long random campaigns of every property test.
fuzz: .venv/installed-dev
	FLEETPILOT_FUZZ=1 $(BIN)/pytest -m hypothesis

# 1,000 streams through 16 emulated engines that come and go, for 10 minutes.
soak: .venv/installed-dev
	FLEETPILOT_SOAK=1 $(BIN)/pytest -s tests/dispatcher/test_churn.py

.venv/installed-%: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	touch $@

.venv-vllm/installed: constraints-vllm.txt tools/install_vllm.py
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python tools/install_vllm.py
	touch $@

clean:
	rm -rf build dist demo *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -prune -exec rm -rf {} +
