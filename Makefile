.PHONY: demo test lint format clean

demo: .venv/demo.stamp
	@.venv/bin/dspark demo

# Bytecode of what is imported is kept for the next process, whatever the environment says.
test: export PYTHONDONTWRITEBYTECODE =
test: .venv/test.stamp
	@.venv/bin/python -m pytest -n 2 --dist worksteal

lint: .venv/test.stamp
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/pyright --pythonpath .venv/bin/python

format: .venv/test.stamp
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/%.stamp: pyproject.toml constraints.txt scripts/environment.sh
	@bash scripts/environment.sh $*
