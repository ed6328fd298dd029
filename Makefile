# Two commands matter to a newcomer: `make demo` (the main job, end to end) and `make test` (all tests).
# Both make .venv by themselves. `make help` lists the rest.

PY := .venv/bin/python
T ?=

.PHONY: help setup demo test check format lint types imports unit integration soak docs bench bench-decide bench-scrub bench-neighbour attacks corpus fuzz lock clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

setup:  ## make .venv with the locked dependencies
	@sh deploy/bootstrap.sh

demo: setup  ## the whole story in under a minute, on this machine
	@$(PY) -I -m exeat demo

# A file stays on one worker, so that its gateway starts once (groups do nothing under this pytest).
test: setup  ## every test (T='path or -k expression' narrows)
	@sh deploy/test-packages.sh
	@$(PY) -m pytest -q -n 2 --dist loadfile $(T)

check: setup lint types imports unit  ## format, lint, types, import contracts, unit, invariants, policy cases, docs

format: setup  ## reformat
	@$(PY) -m ruff format -q .
	@$(PY) -m ruff check -q --fix .

lint: setup  ## only format and lint
	@$(PY) -m ruff format --check -q . || { echo "run 'make format'"; exit 1; }
	@$(PY) -m ruff check -q .

types: setup  ## only types
	@$(PY) -m mypy --no-error-summary

imports: setup  ## only the import contracts
	@.venv/bin/lint-imports --no-cache > .venv/imports.txt 2>&1 || { cat .venv/imports.txt; exit 1; }

# A quarter of the examples of each property, unless a profile is named (a CI does); `make test` plays all.
unit: export HYPOTHESIS_PROFILE ?= quick
unit: setup  ## only unit, invariants, architecture, docs
	@$(PY) -m pytest -q -n 2 --dist worksteal -m 'not slow' tests/unit tests/invariants tests/architecture tests/docs

integration: setup  ## only integration, with real clients
	@$(PY) -m pytest -q -n 2 --dist loadfile tests/integration

soak: setup  ## what lasts minutes: silent conversations, hundreds of connections
	@$(PY) -m pytest -q -m soak tests/integration $(T)

docs: setup  ## write the generated pages anew
	@$(PY) docs/generate.py

attacks: setup  ## play every attack at every entry point, print the table; fails on any hole (T='B033 B034' narrows)
	@PYTHONPATH=. $(PY) tests/attacks/table.py $(T)

corpus: setup  ## play every request of tests/cases/operations in every lane, print services by lanes (T='h2 git-reads' narrows)
	@PYTHONPATH=. $(PY) tests/support/operationtable.py $(T)

fuzz: setup  ## hostile bytes for every parser, a minute each (FUZZ_SECONDS=5 shortens, T='host path' narrows)
	@$(PY) -c 'import atheris' 2>/dev/null || $(PY) -m pip install -q --disable-pip-version-check --require-hashes -r requirements-fuzz.lock
	@PYTHONPATH=. $(PY) tests/fuzz/run.py $(T)

bench: setup  ## measure beside direct, tunnel, mitmproxy and Squid; writes bench/RESULTS.md
	@$(PY) bench/run.py

bench-decide: setup  ## measure a decision by number of rules and by body; writes bench/DECIDE.md
	@$(PY) bench/decide.py

bench-scrub: setup  ## measure scrubbing by number of secrets; writes bench/SCRUB.md
	@$(PY) bench/scrub.py

bench-neighbour: setup  ## measure what one sandbox's abuse costs another one; writes bench/NEIGHBOUR.md
	@sh deploy/bench-packages.sh
	@$(PY) bench/neighbour.py

lock: setup  ## resolve dependencies anew (hashes, no hosts)
	@$(PY) -m uv pip compile -q --universal --generate-hashes --no-emit-index-url --no-header --group dev pyproject.toml -o requirements.lock
	@$(PY) -m uv pip compile -q --universal --generate-hashes --no-emit-index-url --no-header --group fuzz -o requirements-fuzz.lock

clean:  ## remove .venv and caches
	rm -rf .venv .fuzz .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
	find . -name __pycache__ -prune -exec rm -rf {} +
