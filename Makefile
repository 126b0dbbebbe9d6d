# `make demo` and `make test` do all their set-up; they need python3 (3.11 or newer), pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Exact versions of all that is installed, and (the two variables, for old and new pip) of what builds this package.
PIP := PIP_CONSTRAINT=constraints-dev.txt PIP_BUILD_CONSTRAINT=constraints-dev.txt $(BIN)/python -m pip install --quiet --no-compile
DEMO := tgs --layers 48 --scheme xavier

# Packages are compiled as they are imported. Where a machine forbids that, every process would compile PyTorch anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test suite test-slow mutants lint docs docs-links fuzz bench gpu-pack accuracy constraints clean

demo: $(VENV)/demo.stamp
	@mkdir -p out
	$(BIN)/signalprop compare $(DEMO) --json out/demo.json --plot out/demo.html --overwrite
	@$(BIN)/python -c "import pathlib; print('open', pathlib.Path('out/demo.html').resolve().as_uri(), 'in a browser')"

# Lint and tests side by side: types are checked by one process, for a minute where nothing is cached.
test: $(VENV)/dev.stamp
	@$(MAKE) --no-print-directory --jobs 2 lint suite

# A test uses one thread, so the suite takes as many processes as there are cores (four at most: each imports PyTorch).
suite: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

test-slow: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m slow
	$(BIN)/python -m pytest -m hypothesis --hypothesis-profile=many

# Small errors, one at a time: which of them fast tests catch. 100 in the theory, and 20 in each of the other rooms, where
# most of what is left are bounds that no test holds to the digit.
mutants: $(VENV)/dev.stamp
	$(BIN)/python -m signalprop_lab.mutants
	-for room in measuring repair diagnosis training; do $(BIN)/python -m signalprop_lab.mutants --room $$room --number 20; done

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

# The site; tests/test_site.py builds it too. Warnings are errors: a link that leads nowhere, a formula that cannot be read.
docs: $(VENV)/dev.stamp
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -d out/doctrees docs out/site
	@echo out/site/index.html

# Links to other sites too. It needs the network and what others keep online, so it is not part of the tests.
docs-links: $(VENV)/dev.stamp
	$(BIN)/python -m sphinx --builder linkcheck --quiet -d out/doctrees docs out/links

# 20,000 random command lines, 5,000 random calls and 60 damaged files of every kind: over an hour of one core. What is not one clear line is printed.
fuzz: $(VENV)/dev.stamp
	PYTHONPATH=src:tests $(BIN)/python tests/fuzzing/campaign.py
	PYTHONPATH=src:tests $(BIN)/python tests/fuzzing/calls.py
	EXAMPLES=60 $(BIN)/python -m pytest -m 'slow or not slow' tests/fuzzing -k damaged

bench: $(VENV)/dev.stamp
	$(BIN)/python -m benchmarks

# What `python -m benchmarks.gpu PART` needs on a machine without network, 60 MiB at most: out/gpu-pack.
gpu-pack: $(VENV)/dev.stamp
	$(BIN)/python -m benchmarks.gpu pack

accuracy: $(VENV)/dev.stamp
	$(BIN)/python -m benchmarks.accuracy

# constraints-dev.txt with the newest versions that go together; `make test` then installs and tests them.
constraints:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m benchmarks.constraints

clean:
	rm -rf $(VENV) out .mypy_cache .pytest_cache .ruff_cache .hypothesis

# A stamp is newer than what decides the environment's contents, so that a second run installs nothing.
$(VENV)/demo.stamp: pyproject.toml constraints-dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing signalprop with PyTorch into $(VENV): about 2 GB, once"
	$(PIP) --editable '.[models,report]'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml constraints-dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/demo.stamp
