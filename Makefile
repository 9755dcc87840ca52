# `make demo` and `make test` need Python >= 3.11 and make; everything else goes into .venv. `make help` lists the rest.
PYTHON  ?= python3
TORCH   ?= torch==2.13.0
TRITON  ?= triton==3.6.0
MEGATRON ?= megatron-core==0.19.2
MKDOCS  ?= mkdocs-material>=9.6,<10
WORKERS ?= 2

CPU_WHEELS := https://download.pytorch.org/whl/cpu
BIN        := .venv/bin
DEMO       := .venv/.demo
DEV        := .venv/.dev
COMPILED   := .venv/.compiled
MCORE      := .venv/megatron
PYRIGHT    := $(BIN)/pyright --pythonpath $(BIN)/python

.DEFAULT_GOAL := help
.PHONY: help demo test lint style format docs clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile
	@echo "variables: PYTHON=$(PYTHON)  TORCH=$(TORCH)  WORKERS=$(WORKERS)"

demo: $(DEMO) $(COMPILED)  ## train the tiny model on this machine: dense, indexer warm-up, sparse, report
	@$(BIN)/dsattn train tiny --train.run-dir runs/tiny

# Pyright uses one core, and so does pip: each runs beside other work, and says what it found when that is done. The tests
# start many processes, so bytecode is kept even where the environment says otherwise.
test:  ## lint, and the whole test suite
	@$(MAKE) --silent -j3 $(DEV) $(COMPILED) $(MCORE)
	@$(MAKE) --silent style
	@$(PYRIGHT) >.venv/.pyright 2>&1 & types=$$!; failed=0; \
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal || failed=1; \
	wait $$types || { failed=1; echo "make: pyright found errors" >&2; }; \
	cat .venv/.pyright; exit $$failed

lint: style  ## ruff and pyright
	@$(PYRIGHT)

style: $(DEV)
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check || { echo "make: files above need formatting: run 'make format'" >&2; exit 1; }

format: $(DEV)  ## put files into the format that lint asks for
	@$(BIN)/ruff check --quiet --fix
	@$(BIN)/ruff format --quiet

docs: | .venv/docs  ## render docs/ as a site into build/site
	@NO_MKDOCS_2_WARNING=1 .venv/docs/bin/mkdocs build --quiet --strict
	@echo "build/site/index.html"

clean:  ## remove .venv and caches; runs/ stays
	@rm -rf .venv .pytest_cache .ruff_cache build dist
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# CUDA wheels of torch bring their triton; beside a CPU wheel its interpreter runs our kernels in tests.
# CPU wheels of torch live on an index of their own. It is used where there is no GPU and it answers; the plain index
# serves everybody else (its Linux wheels hold CUDA: large, but right on every machine).
.venv/.torch:
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON) found; name one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"make: dsattn needs Python >= 3.11, but $(PYTHON) is {v[0]}.{v[1]}; name another with PYTHON=...")'
	@echo "installing into .venv (once; again when pyproject.toml changes)"
	@$(PYTHON) -m venv .venv
	@extra=; \
	if ! nvidia-smi -L >/dev/null 2>&1 && $(BIN)/python -c 'from urllib.request import urlopen; urlopen("$(CPU_WHEELS)/torch/", timeout=5)' 2>/dev/null; \
	then extra="--extra-index-url $(CPU_WHEELS)"; fi; \
	$(BIN)/python -m pip install -qq --no-compile $$extra "$(TORCH)"
	@touch $@

# By itself, and not by pip: `make test` installs the rest meanwhile. Files for other versions of Python do not compile.
$(COMPILED): | .venv/.torch
	@$(BIN)/python -m compileall -qq -x '/(testing|tests)/' $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || true
	@touch $@

$(DEMO): pyproject.toml | .venv/.torch
	@$(BIN)/python -m pip install -qq --editable '.[report]'
	@touch $@

# Most of Transformers is never imported: what is, is compiled then.
$(DEV): pyproject.toml | .venv/.torch
	@$(BIN)/python -m pip install -qq --no-compile --editable '.[dev]'
	@test "$$(uname)" != Linux || $(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install -qq --no-compile "$(TRITON)"
	@touch $(DEMO) $@

# The extra `docs`, in an environment of its own: rendering needs no torch.
.venv/docs:
	@mkdir -p .venv && $(PYTHON) -m venv $@ && $@/bin/python -m pip install -qq "$(MKDOCS)" || { rm -rf $@; exit 1; }

# Parity tests read Megatron Core's Python files. Its wheel asks for a newer Python than they need, so it is unpacked, not
# installed. Where pip cannot get it, those tests skip and say so.
$(MCORE): | .venv/.torch
	@$(BIN)/python -m pip download -qq --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 --dest .venv/.megatron "$(MEGATRON)" \
	&& $(BIN)/python -m zipfile -e .venv/.megatron/megatron_core-*.whl $(MCORE) \
	|| echo "make: no $(MEGATRON): its parity tests will skip" >&2
