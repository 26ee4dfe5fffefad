"""`headstart race`: decode a prompt plainly and with drafts, or replay a measured race."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headstart.cli.heads import load_decoder, read_prompt
from headstart.cli.options import HEADS, Loading, with_options
from headstart.decode.options import DecodeOptions
from headstart.errors import UserError
from headstart.support.terminal import say


@with_options()
def race(
    heads: Annotated[str | None, HEADS] = None,
    prompt: Annotated[str | None, typer.Option(help="What the user says; - reads it from standard input.")] = None,
    results: Annotated[
        Path | None, typer.Option("--from", help="Show a race from this results.json of a report instead.")
    ] = None,
    prompt_id: Annotated[
        str | None, typer.Option(help="With --from: show this prompt instead of the one with the median speed-up.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the race to this file, as an animated SVG.")] = None,
    options: DecodeOptions = DecodeOptions(),
    loading: Loading = Loading(),
) -> None:
    """Watch plain decoding and drafting side by side. Each decodes alone first; both then replay at measured speed.

    Example: headstart race runs/quickstart --prompt "Why is the sky blue?"

    Example: headstart race --from report/results.json --out race.svg
    """
    if (heads is None) == (results is None):
        raise UserError("A race needs heads or a report.", "Give HEADS and --prompt, or --from results.json.")
    from headstart.eval.race import conditions, read_race, run_race, show_race

    console = Console()
    if results is not None:
        shown, where = read_race(results, prompt_id)
    else:
        assert heads is not None
        if prompt is None:
            raise UserError("There is no prompt.", "Give a question: --prompt TEXT.")
        from headstart.eval.environment import environment

        question = read_prompt(prompt, options.raw)
        decoder = load_decoder(heads, loading, options)
        tokens = decoder.tokens(question, options.raw, options.tools, options.chat_template_kwargs)
        with Console(stderr=True).status("decoding, plainly and with drafts"):
            shown = run_race(decoder, tokens, question, options)
        where = conditions(decoder.target.name, environment(decoder.target))
    show_race(shown, console)
    if out is not None:
        from headstart.eval.race_svg import race_svg
        from headstart.support.files import write_text
        from headstart.support.provenance import typed

        write_text(out, race_svg(shown, where, typed()))
        say(console, ("Picture", out))
