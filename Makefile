# `make demo` and `make test` are the two commands to know; each sets up all it needs.
# A fresh machine needs python3.11 (or newer) with its venv module, and make. `make help` lists the targets.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
PEERS_STAMP := $(VENV)/.stamp-peers
RAY_STAMP := $(VENV)/.stamp-ray
HYBRID_VENV := .venv-hybrid
PROTO_VENV := .venv-protos
PROTO_STAMP := $(PROTO_VENV)/.stamp
PROTOS := $(sort $(wildcard proto/sordino/proto/v1/*.proto))
PROTOC := $(PROTO_VENV)/bin/python -m grpc_tools.protoc -Iproto
MODEL := .demo/SmolLM2-135M-Instruct.Q4_1.gguf
BUNDLE := .demo/bundle
PYTEST := $(BIN)/python -m pytest
# Test files at a time; much of a test's time goes into waiting for servers to start.
JOBS ?= 2
SOURCES := client dealer server shared tests examples bench notebooks
BENCH_JSON ?= build/bench/decode.json

.DEFAULT_GOAL := help
.PHONY: help venv model demo check protos check-protos test test-slow test-gpu test-peers bench bench-block bench-hybrid notebooks wheel clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{ printf "%-14s %s\n", $$1, $$2 }'

venv: $(STAMP)  ## make .venv with pinned dependencies and Sordino in development mode

$(STAMP): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Sordino needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt pip hatchling editables
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[client,gateway,guides,server,split]' --group dev
	@touch $@

$(PROTO_STAMP): proto/requirements.txt
	"$(PYTHON)" -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/python -m pip install --quiet -r proto/requirements.txt
	@touch $@

model: $(STAMP)  ## fetch the demo model (about 90 MB) and check its hash
	$(BIN)/python examples/fetch_model.py $(MODEL)

demo: $(STAMP) model  ## private generation, end to end, on this machine
	$(BIN)/python examples/demo.py

check: $(STAMP) check-protos  ## format, lint, types, import rules, generated stubs
	$(BIN)/ruff format --check $(wildcard $(SOURCES))
	$(BIN)/ruff check $(wildcard $(SOURCES))
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

protos: $(PROTO_STAMP)  ## write the stubs anew from proto/sordino/proto/v1/*.proto
	$(PROTOC) --python_out=proto --pyi_out=proto --grpc_python_out=proto $(PROTOS)

check-protos: $(PROTO_STAMP)  ## fail if the committed stubs are not what `make protos` writes
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && mkdir -p "$$fresh/sordino/proto/v1" \
	  && $(if $(PROTOS),$(PROTOC) --python_out="$$fresh" --pyi_out="$$fresh" --grpc_python_out="$$fresh" $(PROTOS),true) \
	  && diff -r -x __pycache__ -x '*.proto' -x __init__.py -x py.typed "$$fresh/sordino" proto/sordino \
	  || { echo "the stubs in proto/ are not up to date: run 'make protos'" >&2; exit 1; }

test: $(STAMP) model  ## everything but the slow, GPU and peer tests
	@# oneDNN without VNNI computes int8 products silently wrong: the kernel must notice, and still be exact.
	ONEDNN_MAX_CPU_ISA=AVX2 $(PYTEST) tests/unit/server/test_kernel.py
	$(PYTEST) -n $(JOBS) --dist loadfile

$(RAY_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[ray]'
	@touch $@

test-slow: $(RAY_STAMP) model  ## the tests that take minutes
	$(PYTEST) -m slow --timeout=1800

test-gpu: $(STAMP)  ## the tests that need a CUDA device
	$(PYTEST) -m gpu

$(PEERS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[peers,crypten]'
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps crypten  # see docs/dependencies.md
	@touch $@

test-peers: $(PEERS_STAMP)  ## the tests that compare with other frameworks, and with SEAL
	$(PYTEST) -m peers --timeout=1800

$(BUNDLE)/manifest.json: | $(STAMP) model
	$(BIN)/sordino split $(MODEL) $(BUNDLE)

bench: $(STAMP) $(BUNDLE)/manifest.json  ## time of a token, masked and clear, beside transformers
	@mkdir -p $(dir $(BENCH_JSON))
	$(BIN)/sordino bench decode --bundle $(BUNDLE) --model $(MODEL) --protocols masked,clear --reference transformers --tokens 64 --json $(BENCH_JSON)

bench-block: $(PEERS_STAMP) $(BUNDLE)/manifest.json  ## one transformer block on shares, beside CrypTen
	@mkdir -p $(dir $(BENCH_JSON))
	$(BIN)/sordino bench block --bundle $(BUNDLE) --protocols mpc,crypten --json $(dir $(BENCH_JSON))block.json

$(HYBRID_VENV)/.stamp: bench/peers/concrete_ml/requirements.txt
	"$(PYTHON)" -m venv $(HYBRID_VENV)
	$(HYBRID_VENV)/bin/python -m pip install --quiet -r bench/peers/concrete_ml/requirements.txt
	@touch $@

bench-hybrid: $(STAMP) $(HYBRID_VENV)/.stamp  ## Concrete ML's HybridFHEModel beside Sordino (makes an environment of 6 GB)
	@mkdir -p $(dir $(BENCH_JSON))
	$(BIN)/python bench/peers/concrete_ml/compare.py $(HYBRID_VENV)/bin/python --json $(dir $(BENCH_JSON))hybrid.json

notebooks: $(STAMP)  ## run every notebook
	$(PYTEST) tests/integration/test_notebooks.py

wheel: $(STAMP)  ## build dist/sordino-*.whl
	$(BIN)/python -m build --wheel --no-isolation

clean:  ## remove what was built; keeps the virtual environments and the model
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .numba_cache
	find $(wildcard $(SOURCES)) proto -name __pycache__ -type d -prune -exec rm -rf {} +
