"""The stages of `headstart run`: target, conversations, states, train, tune, export, eval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headstart.data.prompts.questions import read_questions
from headstart.drafters.catalog import check_drafter
from headstart.errors import UserError
from headstart.eval.methods import TREES, expand
from headstart.pipeline.data_stages import DATA_STAGES
from headstart.pipeline.head_stages import HEAD_STAGES
from headstart.pipeline.report_stages import REPORT_STAGES
from headstart.pipeline.run import Stage
from headstart.recipes.recipe import Recipe
from headstart.train.checks import check_training

STAGES = (*DATA_STAGES, *HEAD_STAGES, *REPORT_STAGES)


def stages_until(name: str) -> tuple[Stage, ...]:
    """Return the stages up to and including `name`."""
    return STAGES[: [stage.name for stage in STAGES].index(name) + 1]


def check_inputs(recipe: Recipe, stages: Sequence[Stage]) -> None:
    """Raise a UserError early for inputs that would stop one of the stages after minutes of work."""
    names = {stage.name for stage in stages}
    if "train" in names:
        check_training(recipe)
    if "conversations" in names:
        for source in recipe.data.sources:
            prompts = Path(source.source).expanduser()
            if prompts.suffix in (".json", ".jsonl") and not prompts.is_file():
                raise UserError(
                    f"No file at {source.source}.", "Check data.prompts; a relative path starts at the current folder."
                )
        for file in recipe.data.exclude:
            read_questions(Path(file).expanduser())
    if "eval" not in names:
        return
    for name in expand(recipe.eval.compare, "heads"):
        if name not in TREES:
            check_drafter(name)
    if recipe.eval.questions != "heldout":
        read_questions(Path(recipe.eval.questions).expanduser())
    elif not recipe.data.heldout:
        raise UserError(
            "The report needs held-out prompts, and data.heldout is 0.",
            "Set data.heldout=64, or eval.questions to a question file.",
        )
