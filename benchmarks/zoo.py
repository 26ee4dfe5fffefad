"""Write the table of zoo recipes into README.md, from plans that read only the config of each target.

python benchmarks/zoo.py
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from scaling import PROMPT_TOKENS
from tables import table

from headstart.pipeline.plan import Plan, make_plan
from headstart.pipeline.run import Run
from headstart.recipes.recipe import load_recipe, packaged_recipes
from headstart.support.files import format_bytes

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "README.md"
PLANS = ROOT / "docs" / "plans"
BLOCK = re.compile(r"(<!-- zoo -->\n).*?(<!-- /zoo -->)", re.DOTALL)
ZOO = tuple(name for name, file in packaged_recipes().items() if file.parent.name == "zoo")


def plan(name: str) -> Plan:
    """Plan a recipe without the weights of its target."""
    recipe = load_recipe(name, [f"target={PLANS / name}"])
    return make_plan(Run(recipe, Path("nowhere"), Console(quiet=True)), prompt_tokens=PROMPT_TOKENS)


def _row(name: str) -> list[str]:
    estimate = plan(name)
    assert not estimate.problems, estimate.problems
    facts = dict(estimate.facts)
    return [
        f"`{name}`",
        f"`{load_recipe(name).target.spec}`",
        facts["Parameters"].partition(",")[0],
        format_bytes(estimate.disk["export"]),
        format_bytes(estimate.memory["train"]),
    ]


def text() -> str:
    """Render the table between the marks."""
    head = ["recipe", "target", "parameters", "heads on disk", "GPU memory while training, at least"]
    return f"\n{table(head, [_row(name) for name in ZOO])}\n\n"


def page(before: str) -> str:
    """Return the page with the table replaced."""
    return BLOCK.sub(lambda match: match.group(1) + text() + match.group(2), before)


def main(arguments: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
