# make setup   the environment, in .venv        make test   lint, types and tests
# make demo    a comparison, four minutes       make bench  time and peak on your GPU, and the tables
# make docs    the documentation, into site/   make clean  all of it away

PYTHON ?= python3
BIN := .venv/bin
# One thread: with two on busy cores, threads wait for each other and a step of 12 ms took up to 3.9 s.
RUN := OMP_NUM_THREADS=1

.PHONY: setup test demo bench docs clean

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev,train,docs]"
	touch $@

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(RUN) $(BIN)/python -m pytest -n 2 -q

demo: setup
	$(RUN) $(BIN)/halfback compare

bench: setup
	$(RUN) $(BIN)/python benchmarks/depth.py
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/halfback bench
	$(BIN)/python benchmarks/tables.py

docs: setup
	$(RUN) $(BIN)/python docs/make.py
	$(BIN)/python -m mkdocs build

clean:
	rm -rf .venv build dist out site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
