# make demo and make test do everything on a fresh machine: the virtual environment, the
# pinned packages, the native build, then the job. Later runs skip what is up to date.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Tests wait for processes and deadlines half of their time, so two of them share two cores well.
WORKERS ?= 2
SHARED := --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder

CC ?= cc
RAW_UDP_FLAGS := -std=c11 -O3 -march=native -Wall -Wextra -Werror -pthread

NATIVE := $(wildcard native/*.[ch] native/lab/*.[ch]) native/build_cffi.py
C_FILES := $(wildcard native/*.[ch] native/lab/*.[ch] tests/native/*.[ch] benchmarks/micro/*.[ch] tools/*.[ch])

.DEFAULT_GOAL := help
.PHONY: help demo test lint format conformance bench doctor examples netem clean

help:
	@echo "make demo      train a small GPT five times and compare (about 6 minutes)"
	@echo "make test      the whole test suite"
	@echo "make lint      ruff, mypy and clang-format"
	@echo "make format    let ruff and clang-format rewrite the sources"
	@echo "make conformance  torch's suite for backends against gloo and lossy (half an hour)"
	@echo "make bench     all-reduce against gloo, then the bare sockets"
	@echo "make doctor    what this machine can do"
	@echo "make examples  every example with gloo and with lossy at 5% loss; writes docs/examples.md"
	@echo "make netem     the laboratory against real tc netem, in a guest (root, QEMU; 8 minutes at most)"
	@echo "make clean     remove what was built; the packages in $(VENV) stay"

demo: $(VENV)/.built
	$(BIN)/lossycoll demo $(ARGS)

test: $(VENV)/.built benchmarks/build/raw_udp
	$(BIN)/python -m pytest $(SHARED) $(ARGS)

lint: $(VENV)/.built
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(C_FILES)

format: $(VENV)/.packages
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_FILES)

conformance: $(VENV)/.built
	$(BIN)/python -m tests.conformance --write docs/conformance.md $(ARGS)

bench: $(VENV)/.built benchmarks/build/raw_udp
	$(BIN)/lossycoll bench $(ARGS)
	$(BIN)/python -m benchmarks.micro.raw_udp

doctor: $(VENV)/.built
	$(BIN)/lossycoll doctor

examples: $(VENV)/.built
	$(BIN)/python examples/run.py --docs

netem: $(VENV)/.built
	$(BIN)/python -m tools.netem_check $(ARGS)

clean:
	rm -rf build benchmarks/build *.egg-info lossycoll/_native*.so lossycoll/_lab*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks demo-results
	rm -f $(VENV)/.built

# The two stamps below say when packages and extension were last brought up to date.

$(VENV)/.packages: requirements-dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --requirement requirements-dev.txt
	touch $@

# Without isolation the build uses the pinned setuptools and cffi, and needs no second copy.
$(VENV)/.built: $(VENV)/.packages $(NATIVE) setup.py pyproject.toml
	LOSSYCOLL_WERROR=1 $(BIN)/python -m pip install --no-build-isolation --editable .[demo]
	touch $@

benchmarks/build/raw_udp: benchmarks/micro/raw_udp.c benchmarks/micro/raw.h
	mkdir -p $(@D)
	$(CC) $(RAW_UDP_FLAGS) -o $@ $<

benchmarks/build/raw_duplex: benchmarks/micro/raw_duplex.c benchmarks/micro/raw_ring.c benchmarks/micro/raw_end.h benchmarks/micro/raw.h
	mkdir -p $(@D)
	$(CC) $(RAW_UDP_FLAGS) -o $@ $(filter %.c,$^)
