"""Write the plans of docs/scaling.md and README.md (the zoo); `headstart plan` needs only the configs of the targets.

python benchmarks/plans.py            # updates the pages
python benchmarks/plans.py --check    # names the pages that differ, and exits with 1
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from tables import table

from headstart.pipeline.plan import Plan, make_plan
from headstart.pipeline.run import Run
from headstart.recipes.recipe import load_recipe, packaged_recipes
from headstart.support.files import format_bytes

ROOT = Path(__file__).resolve().parents[1]
PLANS = ROOT / "docs" / "plans"
BLOCK = re.compile(r"(<!-- (plans|zoo) -->\n).*?(<!-- /\2 -->)", re.DOTALL)
PROMPT_TOKENS = 300
_SERVED = "data.server=http://node1:8000"


def plan_of(recipe: str, overrides: Sequence[str], processes: int = 1) -> Plan:
    """Plan a recipe without the weights of its target."""
    run = Run(load_recipe(recipe, overrides), Path("nowhere"), Console(quiet=True))
    plan = make_plan(run, processes, PROMPT_TOKENS)
    assert not plan.problems, plan.problems
    return plan


# -- docs/scaling.md ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """One column of the table.

    Attributes:
        title: of the column.
        model: folder in docs/plans.
        recipe: packaged recipe.
        processes: of the training.
        overrides: of the recipe.
    """

    title: str
    model: str
    recipe: str
    processes: int
    overrides: tuple[str, ...] = ()

    def plan(self) -> Plan:
        return plan_of(self.recipe, [f"target={PLANS / self.model}", *self.overrides, _SERVED], self.processes)

    @property
    def command(self) -> str:
        words = [f"target=docs/plans/{self.model}", *self.overrides, _SERVED]
        words += [f"--processes {self.processes}", f"--prompt-tokens {PROMPT_TOKENS}"]
        return f"headstart plan {self.recipe} {' '.join(words)}"


MILLION = ("data.conversations=1000000", "train.epochs=2")
EXAMPLES = (
    Example("8B, 8 GPUs", "llama-3.1-8b", "eagle3-8b", 8),
    Example("8B, 1 M conversations, 16 GPUs", "llama-3.1-8b", "eagle3-8b", 16, MILLION),
    Example("70B, 8 GPUs", "llama-3.3-70b", "eagle3-70b", 8, ("data.cache_gigabytes=600",)),
    Example("480B MoE, 32 GPUs", "qwen3-coder-480b", "eagle3-70b", 32, ("data.cache_gigabytes=500",)),
)


def scaling() -> str:
    """Return the table and the commands of docs/scaling.md."""
    plans = [example.plan() for example in EXAMPLES]
    facts = [dict(plan.facts) for plan in plans]
    rows = [
        ["parameters, bytes", *(fact["Parameters"] for fact in facts)],
        ["conversations", *(fact["Conversations"].partition(", ")[2] for fact in facts)],
        ["hidden states on disk", *(format_bytes(size) if (size := plan.disk["states"]) else "none" for plan in plans)],
        ["checkpoints and heads on disk", *(format_bytes(plan.disk["train"]) for plan in plans)],
        ["heads to keep", *(format_bytes(plan.disk["export"]) for plan in plans)],
        ["memory of a GPU while training, at least", *(format_bytes(plan.memory["train"]) for plan in plans)],
        ["sent by a process in a step", *(format_bytes(plan.network) for plan in plans)],
        ["steps", *(f"{plan.steps:.0f}" for plan in plans)],
    ]
    commands = "\n".join(example.command for example in EXAMPLES)
    return f"\n{table(['', *(example.title for example in EXAMPLES)], rows)}\n\n```\n{commands}\n```\n\n"


# -- README.md ---------------------------------------------------------------------------------------------------------

ZOO = tuple(name for name, file in packaged_recipes().items() if file.parent.name == "zoo")


def zoo() -> str:
    """Return the table of the zoo."""
    rows = []
    for name in ZOO:
        plan = plan_of(name, [f"target={PLANS / name}"])
        parameters = dict(plan.facts)["Parameters"].partition(",")[0]
        sizes = format_bytes(plan.disk["export"]), format_bytes(plan.memory["train"])
        rows.append([f"`{name}`", f"`{load_recipe(name).target.spec}`", parameters, *sizes])
    head = ["recipe", "target", "parameters", "heads on disk", "GPU memory while training, at least"]
    return f"\n{table(head, rows)}\n\n"


# -- both --------------------------------------------------------------------------------------------------------------

PAGES: dict[str, Callable[[], str]] = {"docs/scaling.md": scaling, "README.md": zoo}


def page(name: str) -> str:
    """Return a page with up-to-date plans."""
    before, text = (ROOT / name).read_text(encoding="utf-8"), PAGES[name]()
    return BLOCK.sub(lambda match: match[1] + text + match[3], before)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page differs")
    options = parser.parse_args(arguments)
    differing = {name: text for name in PAGES if (text := page(name)) != (ROOT / name).read_text(encoding="utf-8")}
    if options.check and differing:
        raise SystemExit(f"{', '.join(differing)}: out of date; run python benchmarks/plans.py")
    for name, text in differing.items():
        (ROOT / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
