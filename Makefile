# Python 3.11 or newer and make are all that a fresh machine needs: every target makes its environment when it is missing.
# Dependencies stand in pyproject.toml, tested versions in constraints*.txt; pip's own configuration is respected.

PYTHON ?= python3

# The course's environment has optimum, which keeps transformers at 4.57; the second one is the 5.x line, as on Colab.
EXTRAS := cpu,course,optimum,dev
EXTRAS_V5 := cpu,course,dev

VENV := .venv/bin/python
VENV_V5 := .venv-v5/bin/python

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: help course test test-v5 test-wheel lab bench lint format constraints wheel clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

course: .venv/.stamp ## Run every notebook on the bundled model; scoreboard and executed copies in build/course/
	@$(VENV) -m t5accel course

test: .venv/.stamp ## Run the tests on transformers 4.57 (notebooks are checked, not run)
	@$(VENV) -m pytest -q

test-v5: .venv-v5/.stamp ## Run the same tests on transformers 5.x, in an environment of their own
	@$(VENV_V5) -m pytest -q

lab: .venv/.stamp ## Open JupyterLab on the notebooks
	@$(VENV) -m jupyter lab notebooks/

bench: .venv/.stamp ## Measure every technique on a seeded t5-small; rows in build/bench.json
	@mkdir -p build
	@$(VENV) -m t5accel bench --model random:t5-small --json build/bench.json

lint: .venv/.stamp ## Check the code with ruff
	@$(VENV) -m ruff check .

format: .venv/.stamp ## Sort imports, mend what ruff can mend, format the code
	@$(VENV) -m ruff check --fix-only -q .
	@$(VENV) -m ruff format .

constraints: .venv/.stamp .venv-v5/.stamp ## Write down the versions that both environments have now
	@$(call freeze,.venv,constraints.txt,transformers 4.57 with optimum (make test))
	@$(call freeze,.venv-v5,constraints-v5.txt,transformers 5.x without optimum (make test-v5))

wheel: .venv/.stamp ## Build the source archive, and the wheel from it, into dist/
	@rm -rf dist
	@$(VENV) -m build --no-isolation --outdir dist > /dev/null && ls dist

test-wheel: wheel ## Install the wheel into an empty environment, and translate there
	@rm -rf build/wheel && "$(PYTHON)" -m venv build/wheel
	@build/wheel/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt dist/*.whl
	@cd build/wheel && test -n "$$(bin/t5accel run 'translate English to French: I am tired.')" && \
		bin/python -c 'import t5accel; print("1 passed: the wheel translates in", t5accel.__file__)'

clean: ## Remove what can be made again, except the environments
	@rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	@find . -name .venv -prune -o -name .venv-v5 -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment counts as made when its stamp is newer than what it was made from; a half-made one is gone on with.
.venv/.stamp: pyproject.toml constraints.txt
	@$(call install,.venv,constraints.txt,$(EXTRAS))

.venv-v5/.stamp: pyproject.toml constraints-v5.txt
	@$(call install,.venv-v5,constraints-v5.txt,$(EXTRAS_V5))

# $(call install,folder,constraints file,extras)
install = \
	"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Python 3.11 or newer is needed, and \"$(PYTHON)\" is older or missing." \
			"Name another one: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; } ; \
	echo "Installing the versions of $(2) into $(1) (minutes the first time)." && \
	"$(PYTHON)" -m venv $(1) && \
	$(1)/bin/python -m pip --disable-pip-version-check install -qq -c $(2) -e ".[$(3)]" && \
	touch $@

# $(call freeze,folder,constraints file,what it is). A build's local label ("+cpu") is no part of the version.
freeze = \
	$(1)/bin/python -m pip --disable-pip-version-check freeze --exclude-editable > $(1)/freeze.txt && \
	{ echo "\# The exact versions that were tested: $(3)."; \
	echo "\# Written by \`make constraints\` from $(1); change it by installing there, testing, and writing it again."; \
	sed -e '/ @ /d' -e 's/+[A-Za-z0-9.]*$$//' $(1)/freeze.txt; } > $(2) && \
	rm $(1)/freeze.txt && touch $(1)/.stamp && echo "Wrote $(2)."
