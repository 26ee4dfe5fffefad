"""Runs the printed commands of README.md, docs/ and examples/ at toy size: see `rehearse`."""
