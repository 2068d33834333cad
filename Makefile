# make demo: generate text from the embedded model.   make test: lint, format, tests.
# make test-matrix: the tests on every supported interpreter found.
# Each target sets up what it needs; only Python (3.11 or newer) is expected.

PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
MATRIX = 3.11:0.10.2 3.12:0.11.2

.PHONY: demo test test-matrix lint format clean

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check $(JAX) -e ".[serve,train,dev]"
	touch $@

demo: $(VENV)/ready
	$(RUN) scripts/generate.py --prompt "Once upon a time" --prompt "The capital of France is" --max_tokens 32

lint: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

test: lint
	$(RUN) -m pytest -q -n 2 --dist loadfile tests

test-matrix:
	@tested=; for pair in $(MATRIX); do \
	  python=; for candidate in python$${pair%%:*} $(HOME)/.pyenv/versions/$${pair%%:*}.*/bin/python; do \
	    if $$candidate -c "" 2>/dev/null; then python=$$candidate; fi; done; \
	  if [ -z "$$python" ]; then echo "== Python $${pair%%:*}: not found, not tested"; continue; fi; \
	  echo "== Python $${pair%%:*}, JAX $${pair##*:}"; \
	  $(MAKE) test PYTHON=$$python VENV=.venv-$${pair%%:*} JAX="jax==$${pair##*:}" || exit 1; tested=yes; \
	done; test -n "$$tested"

format: $(VENV)/ready
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf .venv .venv-* build dist *.egg-info
