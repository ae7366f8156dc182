# make demo   from a fresh clone: makes .venv, installs, trains tiny-k2 to answer like Yoda
# make test   the same set-up if needed, then the whole test suite
# make studies   every question of examples/lab, with its answer
# Needs Python 3.11, 3.12 or 3.13 and a package index; nothing else.

PYTHON ?= $(firstword $(foreach v,python3.11 python3.12 python3.13 python3,$(if $(shell $(v) -c 'import sys; print((3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null | grep True),$(v))))
BIN := .venv/bin

.PHONY: demo test lint docs nightly studies clean
demo: .venv/installed
	$(BIN)/unfreeze demo

# A process per core and one more (conftest.py), one thread each. Before them the CPU loops of training and of
# generation are compiled once, which each would do anew,
# and what is imported is kept as byte code, whatever the shell says. A file goes
# to one process, which builds once what its tests share; the longest first (tests/durations.py). A test that
# waits for ever is named, with its stack, and the others go on.
test: .venv/installed
	@for dtype in float32 bfloat16; do (OMP_NUM_THREADS=2 $(BIN)/python -m unfreeze.kernels.choice.prepare $$dtype cpu; \
		$(BIN)/python -c "import unfreeze; unfreeze.load('tiny-k2', dtype='$$dtype').warm_up()") & done; wait
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --timeout 300 --dist loadfile --no-loadscope-reorder $(TESTS)

lint: .venv/installed
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check --quiet src tests examples benchmarks conftest.py
	$(BIN)/pyright

docs: .venv/installed   # the site, into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

nightly: .venv/installed   # an hour: what is too long for every change; its last result is docs/measured/nightly.md
	$(BIN)/python benchmarks/nightly.py --write docs/measured/nightly.md

# Each study of examples/lab, up to 10 minutes on two cores; what was interrupted goes on. One that fails stops none.
studies: .venv/installed
	@failed=; for study in examples/lab/*.toml; do grep -q '^question' $$study || continue; \
		$(BIN)/unfreeze lab $$study --results benchmarks/results/studies || failed="$$failed $$study"; done; \
		$(BIN)/python benchmarks/studies_page.py --write docs/measured/studies.md; \
		if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

# torch goes first and alone: where the index or a wheel folder holds its CPU build, nothing heavier is pulled in by the others.
.venv/installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "unfreeze needs Python 3.11, 3.12 or 3.13; none found. Install one, or run: make PYTHON=/path/to/python3.12 …"; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv build
