# Python 3.11 or newer and make are all that a fresh machine needs: every target makes its environment when it is missing.
# Dependencies are listed in pyproject.toml, tested versions in constraints*.txt; pip's own configuration is respected.

PYTHON ?= python3

# The course's environment has optimum, which keeps transformers at 4.57; the second one is the 5.x line, as on Colab.
EXTRAS := cpu,course,optimum,openvino,serving,dev
EXTRAS_V5 := cpu,course,openvino,serving,dev

VENV := .venv/bin/python
VENV_V5 := .venv-v5/bin/python
BROWSER := build/browser-site
TENSORRT := build/tensorrt-site
KERNEL := build/kernel-site
SITE := build/site-tools
SUPPLY := build/supply-tools
NPM := $(shell command -v npm)

# What Colab has before the first cell of a notebook runs, as far as it matters to the course, for test-colab.
ON_COLAB := torch transformers numpy ipykernel

# Each peer's environment: what lies in requirements/peers/NAME.txt. Ours is .venv, and of T5Gemma 2 .venv-v5.
PEERS := transformers4 transformers5 optimum openvino openvino4 ctranslate2 ctranslate2-v5 torchao onnxruntime-beam-search llama-cpp transformers-js
# What npm adds to two of them.
PEERS_BY_NPM := build/peers/llama-cpp/package build/peers/transformers-js/node_modules
# And of each server that brings its own: requirements/servers/NAME.txt.
SERVERS := triton ray
QUICK :=
RUN :=
GRID :=
ALL :=

# Which tests `make test-v5` runs: `.ci/run` leaves out those that no version of transformers changes.
ONLY := not long
# And where; without a folder, those of `make test`.
TESTS :=
ALL_TESTS := tests/core tests/serve tests/repo tests/bench tests/training

# With which Pythons `make release-check` tests the wheel; it names those that it does not find.
PYTHONS := python3.11 python3.12 python3.13

TEXT := Where is my bag?

# What comes with conda-forge's PyTorch: pip must not replace it by the build with CUDA that is on PyPI.
BY_CONDA := torch|numpy|filelock|fsspec|jinja2|markupsafe|mpmath|networkx|setuptools|sympy|typing_extensions

# For badges; they are given on the command line, never taken from the environment.
REPO :=
BRANCH := main

# From 1.29 on, the packages of ONNX Runtime report how they are used to their maker, unless this is set; the hub's client
# tells which libraries ask.
export ORT_DISABLE_TELEMETRY := 1
export HF_HUB_DISABLE_TELEMETRY := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: help translate course course-v5 workshop test test-bench test-v5 test-long test-wheel test-binder test-colab test-browser test-web test-tensorrt test-kernel \
	test-triton test-ray test-ray-long release-check lab demo bench peers serving gpu-bundle lint format site links web \
	constraints sbom audit wheel wheelhouse badges clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

translate: .venv/.stamp ## Translate a sentence into French with the bundled model [TEXT="I am tired."]
	@$(VENV) -m t5accel run "translate English to French: $(TEXT)"

course: .venv/.stamp ## Run every notebook on the bundled model; scoreboard and executed copies in build/course/
	@$(VENV) -m bench course

course-v5: .venv-v5/.stamp ## The same on transformers 5.x, into build/course-v5/
	@$(VENV_V5) -m bench course --out build/course-v5

workshop: .venv/.stamp ## Say which tasks ("Your turn") are solved in notebooks/, as they were saved [RUN=1 executes them]
	@$(VENV) -m bench workshop$(if $(RUN), --run)

test: .venv/.stamp ## Run the tests of the package, its server and the repository on transformers 4.57
	@$(VENV) -m pytest -q -n logical --dist worksteal --durations=20 --durations-min=2

test-bench: .venv/.stamp ## Run the tests of bench/ and training/
	@$(VENV) -m pytest -q -n logical --dist worksteal --durations=20 --durations-min=2 tests/bench tests/training

test-v5: .venv-v5/.stamp ## Run the same tests on transformers 5.x, in an environment of their own
	@$(VENV_V5) -m pytest -q -n logical --dist worksteal -m "$(ONLY)" $(TESTS)

test-long: .venv/.stamp ## Run the tests that take too long for every merge
	@$(VENV) -m pytest -q -n logical --dist worksteal -m long $(ALL_TESTS)

lab: .venv/.stamp ## Open JupyterLab on the notebooks
	@$(VENV) -m jupyter lab notebooks/

demo: build/demo/.stamp ## Serve the page that compares ways of running a model, in an environment of its own
	@build/demo/bin/python -m bench demo

bench: .venv/.stamp ## Measure every technique on a seeded t5-small; rows in build/bench.json and build/engine.json
	@mkdir -p build
	@$(VENV) -m bench board --model random:t5-small --json build/bench.json
	@$(VENV) -m bench.record.engine --json build/engine.json

peers: .venv/.stamp $(if $(filter gemma,$(GRID)),.venv-v5/.stamp) $(PEERS:%=build/peers/%/.stamp) $(PEERS_BY_NPM) ## Measure our engine beside its peers, up to an hour; goes on where it stopped [QUICK=1] [GRID=families|gemma]
	@$(if $(filter gemma,$(GRID)),$(VENV_V5),$(VENV)) -m bench.record.peers $(if $(GRID),--grid $(GRID)) $(if $(QUICK),--quick)

serving: .venv/.stamp $(SERVERS:%=build/servers/%/.stamp) ## Put load on our server and on others, half an hour; goes on where it stopped [QUICK=1]
	@$(VENV) -m bench.record.serving $(if $(QUICK),--quick)

gpu-bundle: .venv/.stamp ## Gather in build/gpu/ what the GPU suite needs on a machine without a network
	@$(VENV) scripts/gpu_bundle.py build/gpu

lint: .venv/.stamp ## Check the code with ruff, and the spelling with codespell
	@$(VENV) -m ruff check .
	@$(VENV) -m codespell_lib

format: .venv/.stamp ## Sort imports, mend what ruff can mend, format the code
	@$(VENV) -m ruff check --fix-only -q .
	@$(VENV) -m ruff format .

links: site ## Ask other hosts for the pages that ours link to, which needs a network
	@$(SITE)/bin/python -m sphinx -q -b linkcheck -c docs/site build/site-source build/links

site: $(SITE)/.stamp $(if $(NPM),web) ## Build README, guides, notebooks, scoreboards, the reference and (with npm) the web page in build/site/
	@rm -rf build/site build/site-source && mkdir -p build/site-source
	@cp -R CHANGELOG.md CONTRIBUTING.md SECURITY.md LICENSE LICENSE-docs NOTICE data docs notebooks build/site-source
	@mkdir build/site-source/web && cp -R web/src build/site-source/web
	@cat README.md docs/site/contents.md > build/site-source/index.md
	@$(VENV) scripts/site_pages.py build/site-source $(if $(NPM),--web)
	@$(SITE)/bin/python -m sphinx -q -W --keep-going -j auto -c docs/site build/site-source build/site
	@$(SITE)/bin/python scripts/site_licences.py > build/site/LICENSES.txt
	@$(if $(NPM),cp -R build/web build/site/web,echo "npm is missing: without the web page.")
	@echo "Open build/site/index.html."

web: .venv/.stamp web/node_modules/.package-lock.json ## Build a web page that runs the bundled model without a server, in build/web/
	@$(VENV) scripts/web_models.py build/web && node web/build.mjs build/web
	@du -sh build/web && echo "Any static host will do: $(PYTHON) -m http.server -d build/web -b 127.0.0.1"

constraints: .venv/.stamp .venv-v5/.stamp ## Write down the versions that both environments have now
	@$(call freeze,.venv,requirements/constraints.txt,transformers 4.57 with optimum (make test))
	@$(call freeze,.venv-v5,requirements/constraints-v5.txt,transformers 5.x without optimum (make test-v5))
	@{ echo "# constraints.txt without what conda-forge's PyTorch brings to Binder. Written by \`make constraints\`."; \
		grep -Evi '^(\#|($(BY_CONDA))==)' requirements/constraints.txt; } > requirements/constraints-binder.txt
	@$(call hashes,requirements/constraints.txt,requirements/hashes.txt)
	@$(call hashes,requirements/constraints-v5.txt,requirements/hashes-v5.txt)

sbom: .venv/.stamp $(SUPPLY)/.stamp ## List the packages of the tested environment and their licences in build/sbom.json (CycloneDX)
	@$(SUPPLY)/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible \
		--output-file build/sbom.json .venv && echo "Wrote build/sbom.json."

audit: $(SUPPLY)/.stamp ## Compare the tested versions with the package index's list of known vulnerabilities
	@for list in constraints constraints-v5; do \
		$(SUPPLY)/bin/pip-audit --strict --no-deps --disable-pip -r requirements/$$list.txt || exit; done

wheel: .venv/.stamp ## Build the source archive, and the wheel from it, into dist/
	@rm -rf dist
	@$(VENV) -m build --no-isolation --outdir dist > /dev/null && ls dist

test-wheel: wheel ## Install wheel and source archive into empty environments, with torch and without, and run README's example
	@rm -rf build/wheel build/wheel-runtime && "$(PYTHON)" -m venv build/wheel && "$(PYTHON)" -m venv build/wheel-runtime
	@build/wheel/bin/python -m pip --disable-pip-version-check install -qq -c requirements/constraints.txt "$$(ls dist/*.whl)[cpu]"
	@build/wheel-runtime/bin/python -m pip --disable-pip-version-check install -qq -c requirements/constraints.txt "$$(ls dist/*.tar.gz)[runtime]"
	@cd build/wheel && test -n "$$(bin/t5accel run 'translate English to French: I am tired.')" && \
		bin/python -c 'import t5accel; print("1 passed: the wheel translates in", t5accel.__file__)'
	@$(call one_line,wheel)
	@cd build/wheel && bin/t5accel export --model mini --out export > /dev/null 2>&1 && cd ../wheel-runtime && \
		test -n "$$(bin/t5accel run --model ../wheel/export 'translate English to French: I am tired.')" && \
		bin/python -c 'from importlib.util import find_spec; from t5accel import accelerate; assert not find_spec("torch"); print("1 passed: without torch")'
	@build/wheel/bin/python -m pip --disable-pip-version-check install -qq --no-deps --force-reinstall "$$(ls dist/*.tar.gz)"
	@$(call one_line,source archive)
	@rm -rf build/wheel build/wheel-runtime

test-binder: build/binder/.stamp ## Check what Binder would build, without Docker and conda
	@build/binder/bin/python scripts/check_binder.py

test-colab: ## Let a notebook install the last commit into an environment like Colab's, and translate there
	@rm -rf build/colab && "$(PYTHON)" -m venv build/colab/venv
	@build/colab/venv/bin/python -m pip --disable-pip-version-check install -qq -c requirements/constraints-v5.txt $(ON_COLAB)
	@build/colab/venv/bin/python scripts/check_colab.py

test-browser: .venv/.stamp $(BROWSER)/.stamp ## Run notebooks 00 and 01 in a real browser; screenshots in build/browser/ [ALL=1: every notebook]
	@chromium=$$(scripts/chromium) && CHROMIUM="$$chromium" PYTHONPATH=$(BROWSER) ALL_NOTEBOOKS=$(ALL) $(VENV) -m pytest -q tests/with_browser

test-web: web site $(BROWSER)/.stamp build/demo/.stamp ## Use the web page, the demo and the site in a real browser; screenshots in build/web-test/
	@chromium=$$(scripts/chromium) && CHROMIUM="$$chromium" DEMO_PYTHON=build/demo/bin/python PYTHONPATH=$(BROWSER) \
		$(VENV) -m pytest -q tests/with_web

test-tensorrt: .venv/.stamp $(TENSORRT)/.stamp ## Build TensorRT engines of the bundled model, which needs no GPU
	@PYTHONPATH=$(TENSORRT) $(VENV) -m pytest -q tests/with_tensorrt

test-kernel: .venv/.stamp $(KERNEL)/.stamp ## Interpret our GPU kernel on the CPU, and compile it for GPUs that are not here
	@PYTHONPATH=$(KERNEL) TRITON_INTERPRET=1 $(VENV) -m pytest -q tests/with_kernel
	@PYTHONPATH=$(KERNEL) $(VENV) -m pytest -q tests/with_kernel

test-triton: .venv/.stamp build/servers/triton/.stamp ## Start NVIDIA's Triton server on a repository of ours, and compare its answers
	@$(VENV) -m pytest -q tests/with_triton

test-ray: .venv/.stamp build/servers/ray/.stamp ## Run batch jobs and replicas on Ray on this machine, and kill what runs them
	@$(VENV) -m pytest -q tests/with_ray

test-ray-long: .venv/.stamp build/servers/ray/.stamp ## Kill such a job twenty times, give it ten times the rows, let replicas grow
	@$(VENV) -m pytest -q tests/with_ray -m long

release-check: ## All that has to pass before a release: what CI runs, and what takes too long for every merge [PYTHONS="..."]
	@ALL_TESTS="$(ALL_TESTS)" PYTHONS="$(PYTHONS)" scripts/release_check

wheelhouse: EXTRAS := cpu,course,optimum
wheelhouse: ## Gather wheels and notebooks in build/wheelhouse/ for rooms without a network [EXTRAS=cpu,course]
	@rm -rf build/wheelhouse build/wheelhouse-venv && "$(PYTHON)" -m venv build/wheelhouse-venv
	@build/wheelhouse-venv/bin/python -m pip --disable-pip-version-check wheel -qq -c requirements/constraints.txt \
		--wheel-dir build/wheelhouse ".[$(EXTRAS)]"
	@mkdir build/wheelhouse/notebooks build/wheelhouse/data && cp notebooks/*.ipynb build/wheelhouse/notebooks/
	@cp LICENSE LICENSE-docs NOTICE build/wheelhouse/
	@cp -R bench training build/wheelhouse/ && cp -R $(filter-out data/mini-t5%,$(wildcard data/*)) build/wheelhouse/data/
	@build/wheelhouse-venv/bin/python scripts/wheelhouse_note.py "$(EXTRAS)" > build/wheelhouse/INSTALL.txt
	@du -sh build/wheelhouse

badges: ## Write the course's address into README and notebooks: REPO=owner/name [BRANCH=main]
	@"$(PYTHON)" scripts/badges.py "$(REPO)" --branch "$(BRANCH)"

clean: ## Remove what can be made again, except .venv and .venv-v5
	@rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	@find . -name .venv -prune -o -name .venv-v5 -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment counts as made when its stamp is newer than what it was made from; an interrupted installation is resumed.
.venv/.stamp: pyproject.toml requirements/constraints.txt
	@$(call install,.venv,requirements/constraints.txt,$(EXTRAS))

.venv-v5/.stamp: pyproject.toml requirements/constraints-v5.txt
	@$(call install,.venv-v5,requirements/constraints-v5.txt,$(EXTRAS_V5))

# Beside .venv and not in it: only the browser tests need it, and it is large. Chromium itself comes from the system.
$(BROWSER)/.stamp: pyproject.toml | .venv/.stamp
	@rm -rf $(@D) && echo "Installing what drives the browser into $(@D)." && \
		$(VENV) -m pip --disable-pip-version-check install -qq -c requirements/constraints.txt --target $(@D) $(call extra,browser) && \
		touch $@

web/node_modules/.package-lock.json: web/package.json web/package-lock.json
	@command -v npm > /dev/null || { echo "The web page is built with Node.js 20.11 or newer, and npm is missing." >&2; exit 1; }
	@npm --prefix web ci --silent

# Beside .venv for the same reasons. Linux and Windows only.
$(TENSORRT)/.stamp: pyproject.toml | .venv/.stamp
	@rm -rf $(@D) && echo "Installing TensorRT-RTX into $(@D)." && \
		$(VENV) -m pip --disable-pip-version-check install -qq --target $(@D) $(call extra,tensorrt) && \
		touch $@

# Beside .venv, where torch would find it and compile with it. Linux only.
$(KERNEL)/.stamp: pyproject.toml | .venv/.stamp
	@rm -rf $(@D) && echo "Installing Triton, the language, into $(@D)." && \
		$(VENV) -m pip --disable-pip-version-check install -qq --target $(@D) $(call extra,triton) && \
		touch $@

# In an environment of its own: it imports nothing of ours.
$(SITE)/.stamp: pyproject.toml | .venv/.stamp
	@rm -rf $(@D) && echo "Installing Sphinx into $(@D)." && "$(PYTHON)" -m venv $(@D) && \
		$(@D)/bin/python -m pip --disable-pip-version-check install -qq -c requirements/constraints.txt $(call extra,site) && \
		touch $@

# In an environment of its own: tools that list and audit packages are not among them.
$(SUPPLY)/.stamp: pyproject.toml | .venv/.stamp
	@rm -rf $(@D) && echo "Installing what lists and audits packages into $(@D)." && "$(PYTHON)" -m venv $(@D) && \
		$(@D)/bin/python -m pip --disable-pip-version-check install -qq $(call extra,supply) && \
		touch $@

# Beside the list, not in it: torchvision, which OpenVINO's packages bring, is built for another torch and breaks imports.
build/peers/%/.stamp: requirements/peers/%.txt
	@rm -rf $(@D) && echo "Installing the peer $* into $(@D)." && "$(PYTHON)" -m venv $(@D) && \
		$(@D)/bin/python -m pip --disable-pip-version-check install -qq -r $< && \
		$(@D)/bin/python -m pip --disable-pip-version-check uninstall -qq --yes torchvision 2> /dev/null && \
		touch $@

# A library for each make of processor, which needs no Node.js to run.
build/peers/llama-cpp/package: | build/peers/llama-cpp/.stamp
	@cd $(@D) && npm pack --silent @node-llama-cpp/linux-x64@3.22.1 > /dev/null && tar xzf node-llama-cpp-*.tgz && rm node-llama-cpp-*.tgz

# Without install scripts: they would fetch CUDA's libraries.
build/peers/transformers-js/node_modules: | build/peers/transformers-js/.stamp
	@npm install --silent --ignore-scripts --no-audit --no-fund --no-save --prefix $(@D) @huggingface/transformers@4.3.2

build/servers/%/.stamp: requirements/servers/%.txt
	@rm -rf $(@D) && echo "Installing the server $* into $(@D)." && "$(PYTHON)" -m venv $(@D) && \
		$(@D)/bin/python -m pip --disable-pip-version-check install -qq -r $< && \
		touch $@

# Gradio needs a huggingface-hub that transformers 4.57 refuses.
build/demo/.stamp: requirements/demo.txt
	@rm -rf $(@D) && echo "Installing Gradio and what it shows into $(@D)." && "$(PYTHON)" -m venv $(@D) && \
		$(@D)/bin/python -m pip --disable-pip-version-check install -qq -r $< && \
		touch $@

build/binder/.stamp: pyproject.toml | .venv/.stamp
	@rm -rf $(@D) && "$(PYTHON)" -m venv $(@D) && \
		$(@D)/bin/python -m pip --disable-pip-version-check install -qq $(call extra,binder) && \
		touch $@

# $(call extra,name): the requirements of one extra of pyproject.toml
extra = $$($(VENV) -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*project["optional-dependencies"]["$(1)"])')

# $(call install,folder,constraints file,extras)
install = \
	"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Python 3.11 or newer is needed, and \"$(PYTHON)\" is older or missing." \
			"Name another one: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; } ; \
	echo "Installing the versions of $(2) into $(1) (minutes the first time)." && \
	"$(PYTHON)" -m venv $(1) && \
	$(1)/bin/python -m pip --disable-pip-version-check install -qq -c $(2) -e ".[$(3)]" && \
	touch $@

# $(call one_line,what): README's "One line", from nothing but an empty folder, with what is installed in build/wheel
one_line = \
	rm -rf build/wheel/empty && mkdir build/wheel/empty && \
	awk '/^\#\# / { here = $$0 == "\#\# One line" } here && /^```/ { code = !code; next } here && code' \
		README.md > build/wheel/one_line.py && cd build/wheel/empty && \
	T5ACCEL_CACHE="$$PWD/cache" ../bin/python - < ../one_line.py | grep suis > /dev/null && \
	echo "1 passed: README's example with the $(1)"

# $(call freeze,folder,constraints file,what it is). A build's local label ("+cpu") is no part of the version.
freeze = \
	$(1)/bin/python -m pip --disable-pip-version-check freeze --exclude-editable > $(1)/freeze.txt && \
	{ echo "\# The exact versions that were tested: $(3)."; \
	echo "\# Written by \`make constraints\` from $(1); change it by installing there, testing, and writing it again."; \
	sed -e '/ @ /d' -e 's/+[A-Za-z0-9.]*$$//' $(1)/freeze.txt; } > $(2) && \
	rm $(1)/freeze.txt && touch $(1)/.stamp && echo "Wrote $(2)."

# $(call hashes,constraints file,hashes file). Of all files of each version, whatever their platform.
hashes = \
	{ echo "\# $(notdir $(1)) with hashes, without torch. Written by \`make constraints\`; SECURITY.md says how to install it."; \
	$(VENV) -m uv pip compile -q --no-deps --generate-hashes --no-annotate --no-header --python-version 3.11.9 \
		--no-emit-package torch $(1); } > $(2) && echo "Wrote $(2)."
