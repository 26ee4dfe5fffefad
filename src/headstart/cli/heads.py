"""The commands that take heads: eval, audit, generate, chat. Rooms are imported inside, as in `headstart.cli.app`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console

from headstart.cli.options import (
    AnyTarget,
    AuditDrafters,
    BatchSize,
    Bits,
    Compare,
    Dtype,
    DtypeOption,
    ExactChoice,
    ExactOption,
    Heads,
    Limit,
    MultiTurn,
    Overwrite,
    QuantizationOption,
    Questions,
    Revision,
    Samples,
    Seed,
    TargetOption,
    Temperatures,
    TopP,
    Verifiers,
    listed,
    with_options,
)
from headstart.errors import UserError
from headstart.options import DraftingOptions, GenerateKeywords, GenerateOptions
from headstart.support.files import check_writable
from headstart.support.terminal import ask, complain, say

if TYPE_CHECKING:
    from headstart.api import Decoder, Stream

REPORT_FILES = ("results.json", "report.md", "report.html")
AUDIT_FILES = ("audit.json", "audit.md")


@with_options(DraftingOptions, drafter="heads")
def evaluate(
    heads: Heads,
    questions: Annotated[Path, typer.Option(help='JSONL with {"turns": ["..."]} a line.')],
    out: Annotated[Path, typer.Option(help="Folder for results.json, report.md and report.html.")],
    compare: Compare = None,
    overwrite: Overwrite = False,
    limit: Limit = None,
    dtype: DtypeOption = Dtype.auto,
    options: DraftingOptions = DraftingOptions(),
    batch_size: BatchSize = 1,
    multi_turn: MultiTurn = False,
    target: TargetOption = None,
    any_target: AnyTarget = False,
    exact: ExactOption = ExactChoice.auto,
    quantization: QuantizationOption = None,
    revision: Revision = None,
) -> None:
    """Measure heads on a question file against plain decoding, transformers, and other drafters.

    Example: headstart eval runs/quickstart --questions questions.jsonl --out report --compare all
    """
    from headstart.data.prompts.questions import read_questions

    _check_out(out, REPORT_FILES, overwrite)
    asked = read_questions(questions)
    from headstart.eval.measure import EvalOptions
    from headstart.eval.report import show_compare
    from headstart.pipeline.actions import report
    from headstart.pipeline.summary import show_summary

    console = Console()
    how = EvalOptions(
        **vars(options),
        limit=limit,
        batch_size=batch_size,
        multi_turn=multi_turn,
        heads_name=heads,
        compare=tuple(compare or ()),
    )
    decoder = load_decoder(heads, target, revision, dtype, any_target, exact, quantization, options.drafter)
    results = report(decoder, asked, how, out, console)
    show_summary(results, f"{heads} on {questions.name}", console)
    show_compare(results, console)
    say(console, ("Report", out / "report.html"))


def audit(
    heads: Heads,
    questions: Questions = None,
    out: Annotated[Path | None, typer.Option(help="Folder for audit.json and audit.md.")] = None,
    overwrite: Overwrite = False,
    limit: Limit = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest greedy answer, in tokens.")] = 32,
    temperature: Temperatures = None,
    top_p: TopP = 0.9,
    samples: Samples = 2000,
    drafters: AuditDrafters = None,
    verifier: Verifiers = None,
    seed: Seed = 0,
    dtype: DtypeOption = Dtype.float32,
    target: TargetOption = None,
    any_target: AnyTarget = False,
    exact: ExactOption = ExactChoice.auto,
    quantization: QuantizationOption = None,
    revision: Revision = None,
) -> None:
    """Prove that drafts change nothing, on your own target and heads; exits with 1 if they do.

    In float32, or in any dtype with --exact bits.

    Greedy: every drafter's tokens are those of plain decoding. Sampling: under every verifier the tokens come with the
    frequencies that transformers gives them.

    Example: headstart audit runs/quickstart --out audit
    """
    from headstart.data.prompts.questions import read_questions

    if out is not None:
        _check_out(out, AUDIT_FILES, overwrite)
    asked = [question.turns[0] for file in questions or () for question in read_questions(file)]
    from headstart.eval.audit_run import PROMPTS, AuditOptions, run_audit
    from headstart.eval.verdict import show_audit, write_audit

    standard, console = AuditOptions(), Console()
    options = AuditOptions(
        drafters=listed(drafters) or standard.drafters,
        max_new_tokens=max_new_tokens,
        verifiers=listed(verifier) or standard.verifiers,
        temperatures=standard.temperatures if temperature is None else tuple(temperature),
        top_p=top_p,
        samples=samples,
        seed=seed,
        heads_name=heads,
    )
    decoder = load_decoder(heads, target, revision, dtype, any_target, exact, quantization)
    prompts = [decoder.tokens(text) for text in (asked or PROMPTS)[:limit]]
    results = run_audit(decoder, prompts, options, console)
    if out is not None:
        write_audit(results, out)
    show_audit(results, console)
    if out is not None:
        say(console, ("Evidence", out / "audit.md"))
    if not results["clean"]:
        raise typer.Exit(1)


@with_options(GenerateOptions)
def generate(
    heads: Heads,
    prompt: Annotated[str, typer.Option(help="What the user says.")],
    options: GenerateOptions = GenerateOptions(),
    dtype: DtypeOption = Dtype.auto,
    target: TargetOption = None,
    any_target: AnyTarget = False,
    exact: ExactOption = ExactChoice.auto,
    quantization: QuantizationOption = None,
    revision: Revision = None,
) -> None:
    """Answer one prompt; the text goes to stdout, the figures to stderr.

    Example: headstart generate runs/quickstart --prompt "Why is the sky blue?"
    """
    if not (prompt if options.raw else prompt.strip()):
        raise UserError("The prompt is empty.", "Write what the target is to answer: --prompt TEXT.")
    decoder = load_decoder(heads, target, revision, dtype, any_target, exact, quantization, options.drafter)
    stream = decoder.stream(prompt, **_keywords(options))
    _pour(stream)
    _remark(stream)


@with_options(DraftingOptions, max_new_tokens=512)
def chat(
    heads: Heads,
    options: DraftingOptions = DraftingOptions(),
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    dtype: DtypeOption = Dtype.auto,
    target: TargetOption = None,
    any_target: AnyTarget = False,
    exact: ExactOption = ExactChoice.auto,
    quantization: QuantizationOption = None,
    revision: Revision = None,
) -> None:
    """Talk with the target; after each answer its tokens/s and accepted length (τ).

    Example: headstart chat runs/quickstart
    """
    decoder = load_decoder(heads, target, revision, dtype, any_target, exact, quantization, options.drafter)
    console = Console()
    console.print(f"{decoder.target.name}. Empty line or Ctrl-D ends, /new forgets what was said.", style="dim")
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while text := ask(console):
        if text == "/new":
            messages = list(opening)
            continue
        asked = [*messages, {"role": "user", "content": text}]
        try:
            stream = decoder.stream(asked, **_keywords(options))
            answer = _pour(stream)
            _remark(stream)
        except UserError as error:
            complain(error.problem, f"{error.remedy} /new begins anew.")
            continue
        except KeyboardInterrupt:
            console.print("\nStopped this answer.", style="dim")
            continue
        messages = [*asked, {"role": "assistant", "content": answer}]


def _keywords(options: DraftingOptions) -> GenerateKeywords:
    """The options as keyword arguments of `Decoder.stream`."""
    return cast(GenerateKeywords, vars(options))


def load_decoder(
    heads: str,
    target: str | None,
    revision: str | None,
    dtype: Dtype,
    any_target: bool = False,
    exact: ExactChoice = ExactChoice.auto,
    quantization: Bits | None = None,
    drafter: str = "heads",
) -> Decoder:
    """Heads and their target, ready to generate; a spinner says that it takes a while.

    Where the modules of a target's checkpoint draft, what is named as heads may be the target itself.
    """
    console = Console(stderr=True)
    with console.status("loading"):
        from headstart.api import load
        from headstart.drafters.catalog import check_drafter, kinds_of
        from headstart.hub.pull import has_heads

        check_drafter(drafter)
        alone = {"mtp"} <= kinds_of(drafter) <= {"mtp", "ngram", "lookahead"} and not has_heads(heads)
        return load(
            None if alone else heads,
            (target or heads) if alone else target,
            revision,
            dtype.value,
            any_target=any_target,
            exact=exact.kind,
            quantization=quantization and quantization.value,
        )


def _pour(stream: Stream) -> str:
    """Write a stream's text to stdout as it comes, then its figures to stderr; returns the text."""
    try:
        for piece in stream:
            sys.stdout.write(piece)
            sys.stdout.flush()
    finally:
        stream.close()
        sys.stdout.write("\n")
        sys.stdout.flush()
    answer = stream.answer
    assert answer is not None, "a stream that ran to its end has an answer"
    Console(stderr=True).print(
        f"{len(answer.tokens)} tokens, {answer.tokens_per_second:.1f} tokens/s, τ {answer.tokens_per_round:.2f}, "
        f"first token after {answer.first_token_ms:.0f} ms",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )
    return answer.text


def _check_out(out: Path, files: Sequence[str], overwrite: bool) -> None:
    """Refuse a folder that cannot be written to, or whose report would be lost, before anything is measured."""
    found = [name for name in files if (out / name).exists()]
    if found and not overwrite:
        raise UserError(
            f"{out} holds a report already ({', '.join(found)}).", "Choose another folder, or add --overwrite."
        )
    check_writable(out)


def _remark(stream: Stream) -> None:
    """What a reader of the text should know about how it came to be."""
    console = Console(stderr=True)
    if stream.answer is not None and stream.answer.drafter_error:
        console.print(
            f"The drafter failed ({stream.answer.drafter_error}); decoding went on plainly.",
            style="yellow",
            markup=False,
            soft_wrap=True,
        )
