"""Whether heads of a recipe will go into the formats of engines that it names, found out before they are trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headstart.errors import UserError
from headstart.pipeline.run import Run

if TYPE_CHECKING:
    from headstart.target.frozen import FrozenModel


def check_formats(run: Run, target: FrozenModel) -> list[str]:
    """Refuse settings of heads that a format of `export.formats` cannot hold.

    Args:
        run: its recipe is read.
        target: the frozen model, or its teacher.

    Returns:
        What the user should know, as sentences.

    Raises:
        UserError: naming the setting and what to do.
    """
    formats = run.recipe.export.formats
    if not formats:
        return []
    from headstart.heads.base import family, make_config
    from headstart.hub.engines.export import format_named
    from headstart.hub.engines.facts import facts_of_target

    config = make_config(run.recipe.heads, target)
    heads = family(config.family)(config)
    if heads.publishing_reads_target:
        heads.bind(target)
    facts, said = facts_of_target(target), list[str]()
    for name in formats:
        try:
            said += format_named(name).check_heads(heads.publish(), facts)
        except UserError as error:
            raise UserError(error.problem, f"{error.remedy} Or leave {name} out of export.formats.") from None
    return said
