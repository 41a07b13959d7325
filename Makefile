# `make serve` and `make test` do everything from a fresh clone: they need Python 3.11 to 3.13, make
# and a package index. `make help` lists the rest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

VENV := .venv
BIN := $(VENV)/bin
# Everything that Sterna caches here; `make clean` throws it away.
CACHE := .cache

# The engine's build: that of the environment, which another one would clear, perhaps under a running
# server. Without an environment: CUDA where a GPU answers, else CPU.
ifndef ENGINE
INSTALLED := $(patsubst $(VENV)/.installed-%,%,$(wildcard $(VENV)/.installed-*))
# nvidia-smi also prints there that its driver does not answer.
ENGINE := $(or $(INSTALLED),$(if $(shell nvidia-smi --list-gpus 2>/dev/null | grep '^GPU '),cuda,cpu))
endif
ifeq ($(filter cpu cuda,$(ENGINE)),)
$(error ENGINE is cpu or cuda, not '$(ENGINE)')
endif
STAMP := $(VENV)/.installed-$(ENGINE)

# The vLLM of `make test-next`, and the Triton by whose interpreter kernels of V2 run on CPU.
NEXT_VLLM := 0.33.0
NEXT := $(CURDIR)/$(CACHE)/vllm-$(NEXT_VLLM)
NEXT_TESTS := tests/engine/test_*.py tests/frontend/test_payload.py tests/frontend/vllm_server \
	tests/frontend/http/test_request_errors.py tests/serve/process/test_command_line.py
# Without a GPU's libraries this vLLM prints a line of its own when it is imported.
NEXT_LEFT_OUT := tests/serve/process/test_command_line.py::test_the_console_script_ends_with_a_status_and_one_line
TRITON := $(CURDIR)/$(CACHE)/triton

# What runs notebooks.
JUPYTER := $(CURDIR)/$(CACHE)/jupyter

# Options of `sterna serve`, `sterna bench migration` and pytest, as in
# make serve ARGS="--instances 4", make test ARGS="-k policy -x".
ARGS ?=

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: install
install: $(STAMP) ## Put Sterna, its engine and the developer tools into .venv

$(STAMP): pyproject.toml requirements/excluded-cpu.txt scripts/install.sh
	@scripts/install.sh $(VENV) $(CACHE)/tools $(ENGINE)
	@touch $@

# With PYTHON the environment has this version: the script makes it again.
ifdef PYTHON
ASK_VERSION := -c 'import sys; print(*sys.version_info[:2])' 2>/dev/null
ifneq ($(shell $(PYTHON) $(ASK_VERSION)),$(shell $(BIN)/python $(ASK_VERSION)))
.PHONY: $(STAMP)
endif
endif

# The stamp of an installation that was interrupted says whose files are there.
.PRECIOUS: $(STAMP)

.PHONY: model
model: install ## Fetch and convert the small model (once)
	@$(BIN)/python -m sterna.demo_model.small_model >/dev/null

.PHONY: serve
serve: model ## Serve the small model on two instances at http://127.0.0.1:8000
	@exec $(BIN)/sterna serve $(ARGS)

.PHONY: test
test: lint types site unit ## Lint, check types, build the site and run the default tests

.PHONY: site
site: install ## Build the documentation site in .cache/site/html
	@$(BIN)/python -m scripts.site

.PHONY: unit
unit: model
	@$(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder $(ARGS)

.PHONY: test-slow
test-slow: model ## Run the slow tests
	@$(BIN)/python -m pytest -m "slow and not soak" $(ARGS)

.PHONY: test-tools
test-tools: model ## Run other projects' load generators and lm-eval (docs/benchmarking.md)
	@$(BIN)/python -m pytest -m soak tests/serve/tools $(ARGS)

.PHONY: screenshots
screenshots: model ## Take the README's pictures of the dashboard (needs Debian's chromium)
	@mkdir -p docs/images
	@STERNA_SCREENSHOTS=$(CURDIR)/docs/images $(BIN)/python -m pytest -m slow \
		tests/serve/emulated/test_dashboard_page.py -k recorded $(ARGS)

.PHONY: test-v2
test-v2: model $(TRITON)/.installed ## Move requests between engines with vLLM's V2 model runner, interpreted
	@PYTHONPATH=$(TRITON) TRITON_INTERPRET=1 \
		$(BIN)/python -m pytest -m slow tests/engine/test_v2_moves.py $(ARGS)

.PHONY: test-next
test-next: model $(TRITON)/.installed ## Run what needs no GPU on the next vLLM (docs/internals/next_vllm.md)
	@$(BIN)/python -m scripts.next_vllm $(NEXT_VLLM) $(NEXT)
	@$(BIN)/python -m scripts.vllm_names --check $(NEXT)
	@PYTHONPATH=$(NEXT) $(BIN)/python -m pytest -m "not soak" $(NEXT_TESTS) \
		--deselect $(NEXT_LEFT_OUT) $(ARGS)
	@PYTHONPATH=$(TRITON):$(NEXT) TRITON_INTERPRET=1 \
		$(BIN)/python -m pytest -m slow tests/engine/test_v2_moves.py $(ARGS)

$(TRITON)/.installed: $(STAMP)
	@$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(TRITON) triton==3.7.0
	@touch $@

.PHONY: sim-test
sim-test: install ## Run some hundred clusters in virtual time, under faults
	@$(BIN)/python -m pytest tests/fault_simulation $(ARGS)

.PHONY: sim-soak
sim-soak: install ## Run 100,000 of them into bench/results/sim_soak.json
	@exec $(BIN)/python -m bench.simulation.sim_soak $(ARGS)

.PHONY: bench-check
bench-check: model ## About twelve minutes: fail if a ratio is a fifth worse than in bench/results
	@exec $(BIN)/python -m bench.check $(ARGS)

.PHONY: soak
soak: model ## Half an hour of all kinds of clients: nothing may grow; into bench/results/soak.json (SOAK_SECONDS=180 for less)
	@SOAK_SECONDS=$(or $(SOAK_SECONDS),1800) \
		$(BIN)/python -m pytest -m soak -s tests/serve/emulated/test_soak.py $(ARGS)

.PHONY: chaos
chaos: model ## Hit the processes of a real server for ten minutes into bench/results/chaos.json
	@exec $(BIN)/sterna bench chaos $(ARGS)

.PHONY: bench-migration
bench-migration: model ## Measure migration's downtime into bench/results/migration.json
	@exec $(BIN)/sterna bench migration $(ARGS)

.PHONY: reproduce
reproduce: install ## Run the paper's evaluation into bench/results/paper and docs/evaluation.md
	@exec $(BIN)/sterna reproduce $(ARGS)

.PHONY: notebook
notebook: install ## Run docs/notebooks again, in place
	@$(BIN)/python -m pip install --quiet --upgrade --target $(JUPYTER) nbclient ipykernel
	@PYTHONPATH=$(JUPYTER) JUPYTER_PATH=$(JUPYTER)/share/jupyter $(BIN)/python -m scripts.notebook

.PHONY: model-check
model-check: install ## Check the model of the migration handshake exhaustively (needs spin)
	@exec $(BIN)/python -m bench.simulation.model_check $(ARGS)

.PHONY: mutants
mutants: install ## Plant mistakes in the pure modules; are they found? into bench/results/mutants.json
	@exec $(BIN)/python -m bench.mutants $(ARGS)

.PHONY: lint
lint: install ## Check style
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

.PHONY: types
types: install ## Check types
	@$(BIN)/mypy

.PHONY: clean
clean: ## Remove everything that these targets made
	rm -rf $(VENV) $(CACHE) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src fault_simulation tests bench -name __pycache__ -prune -exec rm -rf {} +
