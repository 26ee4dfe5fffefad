"""The figures of docs/scaling.md, from `headstart plan`: models by their config alone.

python benchmarks/scaling.py            # writes them into the page
python benchmarks/scaling.py --check    # says whether the page differs, and exits with 1
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from tables import table

from headstart.pipeline.plan import Plan, make_plan
from headstart.pipeline.run import Run
from headstart.recipes.recipe import load_recipe
from headstart.support.files import format_bytes

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "scaling.md"
BLOCK = re.compile(r"(<!-- plans -->\n).*?(<!-- end -->)", re.DOTALL)
PROMPT_TOKENS = 300
_SERVED = "data.server=http://node1:8000"


@dataclass(frozen=True)
class Example:
    """One column of the table.

    Attributes:
        title: of the column.
        model: folder of docs/plans.
        recipe: packaged.
        processes: that train.
        overrides: of the recipe.
    """

    title: str
    model: str
    recipe: str
    processes: int
    overrides: tuple[str, ...] = ()

    def plan(self) -> Plan:
        """What the command says."""
        recipe = load_recipe(self.recipe, [f"target={ROOT / 'docs' / 'plans' / self.model}", *self.overrides, _SERVED])
        return make_plan(Run(recipe, Path("nowhere"), Console(quiet=True)), self.processes, PROMPT_TOKENS)

    @property
    def command(self) -> str:
        """What to type."""
        words = [f"target=docs/plans/{self.model}", *self.overrides, _SERVED]
        words += [f"--processes {self.processes}", f"--prompt-tokens {PROMPT_TOKENS}"]
        return f"headstart plan {self.recipe} {' '.join(words)}"


EXAMPLES = (
    Example("8B, 8 GPUs", "llama-3.1-8b", "eagle3-8b", 8),
    Example(
        "8B, 1 M conversations, 16 GPUs",
        "llama-3.1-8b",
        "eagle3-8b",
        16,
        ("data.conversations=1000000", "train.epochs=2"),
    ),
    Example("70B, 8 GPUs", "llama-3.3-70b", "eagle3-70b", 8, ("data.cache_gigabytes=600",)),
    Example("480B MoE, 32 GPUs", "qwen3-coder-480b", "eagle3-70b", 32, ("data.cache_gigabytes=500",)),
)


def rows(plans: Sequence[Plan]) -> list[list[str]]:
    """The table's rows: a figure of every plan."""
    facts = [dict(plan.facts) for plan in plans]
    return [
        ["parameters, bytes", *(fact["Parameters"] for fact in facts)],
        ["conversations", *(fact["Conversations"].partition(", ")[2] for fact in facts)],
        [
            "hidden states on disk",
            *(format_bytes(plan.disk["states"]) if plan.disk["states"] else "none" for plan in plans),
        ],
        ["checkpoints and heads on disk", *(format_bytes(plan.disk["train"]) for plan in plans)],
        ["heads to keep", *(format_bytes(plan.disk["export"]) for plan in plans)],
        ["memory of a GPU while training, at least", *(format_bytes(plan.memory["train"]) for plan in plans)],
        ["sent by a process in a step", *(format_bytes(plan.network) for plan in plans)],
        ["steps", *(f"{plan.steps:.0f}" for plan in plans)],
    ]


def text() -> str:
    """What stands between the marks."""
    plans = [example.plan() for example in EXAMPLES]
    assert not any(plan.problems for plan in plans), [plan.problems for plan in plans]
    commands = "\n".join(example.command for example in EXAMPLES)
    shown = table(["", *(example.title for example in EXAMPLES)], rows(plans))
    return f"\n{shown}\n\n```\n{commands}\n```\n\n"


def page(before: str) -> str:
    """The page with these figures."""
    return BLOCK.sub(lambda match: match.group(1) + text() + match.group(2), before)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the page differs")
    options = parser.parse_args(arguments)
    before = PAGE.read_text(encoding="utf-8")
    after = page(before)
    if options.check and after != before:
        raise SystemExit(f"{PAGE} differs from what plans say now: python benchmarks/scaling.py")
    if not options.check:
        PAGE.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
