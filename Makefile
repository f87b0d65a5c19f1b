# make generate PROMPT="..."   the demo: a real chat model with its trained drafter
# make serve                   a server with the demo and a chat page at http://127.0.0.1:8080
# make test                    everything that CI runs

PYTHON ?= python3
PROMPT ?= Write a Python function that reverses a string.
VENV := .venv
BIN := $(VENV)/bin

.PHONY: generate serve test check clean

generate: $(VENV)/installed
	@$(BIN)/python -m mlx_spec.generate --model demo --prompt "$$PROMPT" $(ARGS)

serve: $(VENV)/server-installed
	@$(BIN)/python -m mlx_spec.serve $(ARGS)

test: $(VENV)/test-installed check
	@sh tests/emulator/install_clang.sh
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile $(ARGS)

check: $(VENV)/test-installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mlx_spec needs Python 3.11 or later; set PYTHON=python3.12, say")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/server-installed: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable ".[server]"
	@touch $@

# The oracle packages pin versions that conflict with ours: they are installed without their dependencies.
$(VENV)/test-installed: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	$(BIN)/python -m pip install --quiet --no-deps dflash==0.1.0
	@touch $@

export PROMPT
