# make demo and make test do everything on a fresh machine: the virtual environment, the
# pinned packages, the native build, then the job. Later runs skip what is up to date.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Tests wait for processes and deadlines half of their time, so four of them share two cores well.
WORKERS ?= 4
SHARED := --numprocesses=$(WORKERS) --dist=loadgroup --no-loadscope-reorder

# The tests start hundreds of processes. Without bytecode files each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

# Another torch than that of requirements-dev.txt, for test-torch; not from the environment.
TORCH :=

CC ?= cc
RAW_UDP_FLAGS := -std=c11 -O3 -march=native -Wall -Wextra -Werror -pthread

NATIVE := $(wildcard native/*.[ch] native/lab/*.[ch] native/sim/*.[ch]) native/build_cffi.py
C_FILES := $(wildcard native/*.[ch] native/lab/*.[ch] native/sim/*.[ch] tests/native/*.[ch] benchmarks/micro/*.[ch] tools/*.[ch])

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-frameworks test-torch test-gpu mutate lint lint-types lint-rest format conformance \
        conformance-gpu bench micro study reports theory doctor docs examples netem rdma versions \
        wheels site release clean

help:
	@echo "make demo      train a small GPT five times and compare (about 6 minutes)"
	@echo "make test      the tests: a short sample of what takes long (20 minutes at most on two cores)"
	@echo "make test-all  all tests (30 minutes at most)"
	@echo "make test-frameworks  the long tests of frameworks whose packages test-all doesn't install"
	@echo "make test-torch TORCH=2.14.1  make test with that torch, in an environment of its own"
	@echo "make test-gpu  CUDA tensors, on a machine with a GPU (PYTHON=its python3; 6 minutes at most)"
	@echo "make mutate    break the code in one place at a time: does a test notice?"
	@echo "make lint      ruff, mypy, import-linter and clang-format"
	@echo "make format    let ruff and clang-format rewrite the sources"
	@echo "make conformance  torch's suite for backends against gloo and lossy (half an hour)"
	@echo "make conformance-gpu  its tests about GPUs, on one that ranks share (4 minutes at most)"
	@echo "make bench     all-reduce against gloo, then the bare sockets"
	@echo "make micro NAME=control_plane  one of benchmarks/micro; ARGS=--help says more"
	@echo "make study NAME=quality  one of benchmarks/studies, where it was stopped; ARGS=--help says more"
	@echo "make reports   tables and pictures of docs/ from the results that are kept; measures nothing"
	@echo "make theory    the figures of docs/theory.md (ARGS=--help says more)"
	@echo "make doctor    what this machine can do"
	@echo "make docs      write docs/api.md from the docstrings"
	@echo "make examples  every example with gloo and with lossy at 5% loss; writes docs/examples.md"
	@echo "make netem     the laboratory against real tc netem, in a guest (root, QEMU; 8 minutes at most)"
	@echo "make rdma      two processes over soft-RoCE, in a guest (root, QEMU; 3 minutes on an idle machine)"
	@echo "make versions ARGS=python3.13:2.15.0  does the wheel work with that Python and torch?"
	@echo "make wheels    sdist and wheels for x86-64 and aarch64 into dist/, each checked"
	@echo "make site      the documentation as a site, into build/site"
	@echo "make release   check everything and build what would be uploaded; uploads nothing"
	@echo "make clean     remove what was built; the packages in $(VENV) stay"

demo: $(VENV)/.built
	$(BIN)/lossycoll demo $(ARGS)

# Repeated in ARGS, -m "" runs a long test by its name.
test: $(VENV)/.built benchmarks/build/raw_udp
	$(BIN)/python -m pytest $(SHARED) -m "not long" $(ARGS)

test-all: $(VENV)/.built $(VENV)/.long $(VENV)/.release benchmarks/build/raw_udp
	$(BIN)/python -m pytest $(SHARED) $(ARGS)

# What test-all skips: examples and schemas whose packages take gigabytes. The page says when all
# have passed, not a part of them.
test-frameworks: $(VENV)/.built $(VENV)/.long $(VENV)/.frameworks
	$(BIN)/python -m pytest $(SHARED) -m "" tests/repository/test_examples.py tests/repository/test_trainjob.py $(ARGS)
	test -n "$(ARGS)" || $(BIN)/python -m tools.frameworks_table

# The extension is of the stable ABI and knows no torch, so both environments share the one built.
test-torch:
	test -n "$(TORCH)"
	$(MAKE) test VENV=build/torch-$(TORCH) TORCH=$(TORCH) ARGS='$(ARGS)'

# With the torch that finds the GPU, which is rarely the one of $(VENV): the extension is all that it
# needs of this tree.
test-gpu:
	LOSSYCOLL_WERROR=1 $(PYTHON) setup.py -q build_ext --inplace
	$(PYTHON) -m pytest tests/gpu $(ARGS)

conformance-gpu:
	LOSSYCOLL_WERROR=1 $(PYTHON) setup.py -q build_ext --inplace
	$(PYTHON) -m tests.conformance.gpu $(ARGS)

mutate: $(VENV)/.built
	$(BIN)/python -m tools.mutate $(ARGS)

# With -j2 types are checked while the extension is built: either uses one core for long.
lint: lint-types lint-rest

lint-types: $(VENV)/.packages
	$(BIN)/mypy

lint-rest: $(VENV)/.built
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/clang-format --dry-run -Werror $(C_FILES)

format: $(VENV)/.packages
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_FILES)

conformance: $(VENV)/.built
	$(BIN)/python -m tests.conformance --write docs/conformance.md $(ARGS)
	$(BIN)/python -m tests.conformance.fault_tolerance

bench: $(VENV)/.built benchmarks/build/raw_udp
	$(BIN)/lossycoll bench $(ARGS)
	$(BIN)/python -m benchmarks.micro.raw_udp

micro: NAME ?= raw_udp
micro: $(VENV)/.built benchmarks/build/raw_udp benchmarks/build/raw_duplex
	$(BIN)/python -m benchmarks.micro.$(NAME) $(ARGS)

study: NAME ?= quality
study: $(VENV)/.built
	$(BIN)/python -m benchmarks $(NAME) --report docs $(ARGS)

reports: $(VENV)/.built
	$(BIN)/python -m benchmarks.reports $(ARGS)

theory: $(VENV)/.built
	$(BIN)/python -m benchmarks.theory $(ARGS)

doctor: $(VENV)/.built
	$(BIN)/lossycoll doctor

docs: $(VENV)/.built
	$(BIN)/python -m tools.api_page

examples: $(VENV)/.built
	$(BIN)/python examples/run.py --docs

netem: $(VENV)/.built
	$(BIN)/python -m tools.netem_check $(ARGS)

rdma: $(VENV)/.built
	$(BIN)/python -m tools.rdma_check $(ARGS)

versions: $(VENV)/.packages
	$(BIN)/python -m tools.check_versions $(ARGS)

wheels: $(VENV)/.built $(VENV)/.release
	rm -rf dist
	$(BIN)/python -m tools.wheels $(ARGS)

# Strictly: what Sphinx warns of is an error. It imports nothing of ours.
site: $(VENV)/.site
	$(BIN)/python -m sphinx -q -W --keep-going -b html -c docs . build/site

# Nothing is uploaded: docs/release.md says what to do with dist/. TESTED is a commit on which make
# test-all has passed; it spares running that here if it is this one.
TESTED :=
release:
	test -z "$$(git status --porcelain)" || { echo "commit first: a release is made of a commit" >&2; exit 1; }
	$(MAKE) lint
	test "$(TESTED)" = "$$(git rev-parse HEAD)" || $(MAKE) test-all
	$(MAKE) wheels site
	cd dist && sha256sum * | tee SHA256SUMS

clean:
	rm -rf build dist benchmarks/build *.egg-info lossycoll/_*.abi3.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks demo-results
	rm -f $(VENV)/.built

# The stamps below say when packages and extension were last brought up to date.

$(VENV)/.packages: requirements-dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' requirements-dev.txt > $(@D)/requirements.txt
	$(BIN)/python -m pip install --requirement $(@D)/requirements.txt
	touch $@

$(VENV)/.long: requirements-long.txt $(VENV)/.packages
	$(BIN)/python -m pip install --requirement requirements-long.txt
	touch $@

$(VENV)/.frameworks: requirements-frameworks.txt $(VENV)/.packages
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --no-build-isolation --requirement requirements-frameworks.txt
	touch $@

$(VENV)/.site: requirements-site.txt $(VENV)/.packages
	$(BIN)/python -m pip install --requirement requirements-site.txt
	touch $@

$(VENV)/.release: requirements-release.txt requirements-site.txt $(VENV)/.packages
	$(BIN)/python -m pip install --requirement requirements-release.txt
	touch $@

# Without isolation the build uses the pinned setuptools and cffi, and needs no second copy.
$(VENV)/.built: $(VENV)/.packages $(NATIVE) setup.py pyproject.toml
	LOSSYCOLL_WERROR=1 $(BIN)/python -m pip install --no-build-isolation --editable .[demo]
	touch $@

benchmarks/build/raw_udp: benchmarks/micro/raw_udp.c benchmarks/micro/raw.h
	mkdir -p $(@D)
	$(CC) $(RAW_UDP_FLAGS) -o $@ $<

benchmarks/build/raw_duplex: $(addprefix benchmarks/micro/,raw_duplex.c raw_end.c raw_ring.c raw_end.h raw_ring.h raw.h)
	mkdir -p $(@D)
	$(CC) $(RAW_UDP_FLAGS) -o $@ $(filter %.c,$^)
