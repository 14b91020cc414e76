# Each target does all its own set-up, inside this folder only.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# Whatever the environment says: the tests start many processes that import the same modules.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-nightly lint docs bench bench-peers clean

demo: $(READY)
	$(BIN)/ordain demo --out demo-out

# A file's tests stay in one process, so that what its fixtures start is started once. In alphabetical order: what takes
# longest is not left to the end.
test: lint
	$(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# What hypothesis looks for, with other examples every time, and many more of them.
test-nightly: $(READY)
	ORDAIN_PROFILE=nightly $(BIN)/python -m pytest -q -n auto --maxprocesses 4 \
		tests/orders/test_random_sequences.py tests/orders/test_every_order.py tests/orders/test_corrupted_states.py \
		tests/balancing/test_devices.py tests/test_hostile.py tests/study/test_data_hypothesis.py

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict src
	$(BIN)/lint-imports --no-cache

# The site, in site/: open site/index.html. Warnings are errors: broken links, missing names.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

bench: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks

# Other libraries, beside the environment and without what they depend on: torchvision and torch-sparse are not used here.
# Results that are in results/peers/ already are not measured again.
bench-peers: $(READY)
	test -d .peers || $(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --target .peers \
		-r benchmarks/peers-requirements.txt
	OMP_NUM_THREADS=1 PYTHONPATH=.peers $(BIN)/python -m benchmarks peers

# torch goes first and alone: its pin decides which build every later package is content with.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -qq --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv .peers demo-out site .pytest_cache .mypy_cache .ruff_cache .hypothesis
