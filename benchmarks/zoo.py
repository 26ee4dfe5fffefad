"""The table of docs/zoo.md: the recipes of the zoo, planned by the config of their targets alone.

python benchmarks/zoo.py writes it into the page.
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
from headstart.recipes.recipe import load_recipe
from headstart.recipes.values import packaged_recipes
from headstart.support.files import format_bytes

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "zoo.md"
PLANS = ROOT / "docs" / "plans"
BLOCK = re.compile(r"(<!-- zoo -->\n).*?(<!-- end -->)", re.DOTALL)
ZOO = tuple(name for name, file in packaged_recipes().items() if file.parent.name == "zoo")


def plan(name: str) -> Plan:
    """What `headstart plan` says of a recipe where the weights of its target are not."""
    recipe = load_recipe(name, [f"target={PLANS / name}"])
    return make_plan(Run(recipe, Path("nowhere"), Console(quiet=True)), prompt_tokens=PROMPT_TOKENS)


def commands(name: str) -> str:
    """What plans, trains, measures and uploads heads, with a card that has the measured figures."""
    return "\n".join(
        [
            f"headstart plan {name}",
            f"headstart run {name}",
            f"headstart export runs/{name} --format vllm --out served/{name}",
            f"headstart push runs/{name} USER/{name}-eagle3",
        ]
    )


def _row(name: str) -> list[str]:
    estimate = plan(name)
    assert not estimate.problems, estimate.problems
    facts = dict(estimate.facts)
    return [
        f"`{name}`",
        f"`{load_recipe(name).target.spec}`",
        facts["Parameters"].partition(",")[0],
        re.findall(r"[\d.]+ M", facts["Heads"])[0],
        format_bytes(estimate.disk["export"]),
        format_bytes(estimate.memory["train"]),
    ]


def text() -> str:
    """What stands between the marks."""
    head = ["recipe", "target", "parameters", "of the heads", "heads to keep", "memory while training, at least"]
    shown = table(head, [_row(name) for name in ZOO])
    typed = "\n\n".join(f"```\n{commands(name)}\n```" for name in ZOO)
    return f"\n{shown}\n\n## Commands\n\n{typed}\n\n"


def page(before: str) -> str:
    """The page with this table and these commands."""
    return BLOCK.sub(lambda match: match.group(1) + text() + match.group(2), before)


def main(arguments: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
