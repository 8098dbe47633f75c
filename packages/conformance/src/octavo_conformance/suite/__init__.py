"""The tests: `pytest --pyargs octavo_conformance.suite --octavo-backend NAME`."""
