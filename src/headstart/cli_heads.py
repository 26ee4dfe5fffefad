"""The commands that take heads: eval, audit, generate, chat. Rooms are imported inside, as in `headstart.cli`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from headstart.cli_options import (
    AnyTarget,
    AuditDrafters,
    BatchSize,
    Compare,
    Draft,
    DraftChoice,
    DrafterName,
    Dtype,
    DtypeOption,
    Heads,
    Limit,
    MaxNewTokens,
    MinP,
    MultiTurn,
    Overwrite,
    Penalty,
    Questions,
    Revision,
    Samples,
    Seed,
    Stops,
    TargetOption,
    Temperature,
    Temperatures,
    TopK,
    TopP,
    Tree,
    TreeChoice,
    VerifierName,
    Verifiers,
    listed,
)
from headstart.errors import UserError
from headstart.files import check_writable
from headstart.terminal import ask, complain, say

if TYPE_CHECKING:
    from headstart.api import Decoder, Stream

REPORT_FILES = ("results.json", "report.md", "report.html")
AUDIT_FILES = ("audit.json", "audit.md")


def evaluate(
    heads: Heads,
    questions: Annotated[Path, typer.Option(help='JSONL with {"turns": ["..."]} a line.')],
    out: Annotated[Path, typer.Option(help="Folder for results.json, report.md and report.html.")],
    compare: Compare = None,
    overwrite: Overwrite = False,
    limit: Limit = None,
    max_new_tokens: MaxNewTokens = 128,
    dtype: DtypeOption = Dtype.auto,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    drafter: DrafterName = "heads",
    tree: Tree = TreeChoice.tuned,
    draft: Draft = DraftChoice.auto,
    verifier: VerifierName = "auto",
    batch_size: BatchSize = 1,
    multi_turn: MultiTurn = False,
    seed: Seed = 0,
    target: TargetOption = None,
    any_target: AnyTarget = False,
    revision: Revision = None,
) -> None:
    """Measure heads on a question file against plain decoding, transformers, and other drafters.

    Example: headstart eval runs/quickstart --questions questions.jsonl --out report --compare all
    """
    from headstart.data.questions import read_questions

    _check_out(out, REPORT_FILES, overwrite)
    asked = read_questions(questions)
    from headstart.eval import EvalOptions, show_compare
    from headstart.pipeline.actions import report
    from headstart.pipeline.summary import show_summary

    console = Console()
    options = EvalOptions(
        limit=limit,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        batch_size=batch_size,
        multi_turn=multi_turn,
        heads_name=heads,
        drafter=drafter,
        tree=tree.kind,
        compare=tuple(compare or ()),
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        verifier=verifier,
        draft=draft.mode,
    )
    results = report(load_decoder(heads, target, revision, dtype, any_target), asked, options, out, console)
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
    target: TargetOption = None,
    any_target: AnyTarget = False,
    revision: Revision = None,
) -> None:
    """Prove that drafts change nothing, on your own target and heads, in float32; exits with 1 if they do.

    Greedy: every drafter's tokens are those of plain decoding. Sampling: under every verifier the tokens come with the
    frequencies that transformers gives them.

    Example: headstart audit runs/quickstart --out audit
    """
    from headstart.data.questions import read_questions

    if out is not None:
        _check_out(out, AUDIT_FILES, overwrite)
    asked = [question.turns[0] for file in questions or () for question in read_questions(file)]
    from headstart.eval.evidence import PROMPTS, AuditOptions, run_audit
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
    decoder = load_decoder(heads, target, revision, Dtype.float32, any_target)
    prompts = [decoder.tokens(text) for text in (asked or PROMPTS)[:limit]]
    results = run_audit(decoder, prompts, options, console)
    if out is not None:
        write_audit(results, out)
    show_audit(results, console)
    if out is not None:
        say(console, ("Evidence", out / "audit.md"))
    if not results["clean"]:
        raise typer.Exit(1)


def generate(
    heads: Heads,
    prompt: Annotated[str, typer.Option(help="What the user says.")],
    drafter: DrafterName = "heads+ngram",
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = 0,
    stop: Stops = None,
    raw: Annotated[bool, typer.Option(help="Continue the prompt as it is, without the chat template.")] = False,
    tree: Tree = TreeChoice.tuned,
    draft: Draft = DraftChoice.auto,
    verifier: VerifierName = "auto",
    dtype: DtypeOption = Dtype.auto,
    target: TargetOption = None,
    any_target: AnyTarget = False,
    revision: Revision = None,
) -> None:
    """Answer one prompt; the text goes to stdout, the figures to stderr.

    Example: headstart generate runs/quickstart --prompt "Why is the sky blue?"
    """
    if not (prompt if raw else prompt.strip()):
        raise UserError("The prompt is empty.", "Write what the target is to answer: --prompt TEXT.")
    decoder = load_decoder(heads, target, revision, dtype, any_target)
    stream = decoder.stream(
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop or (),
        raw=raw,
        drafter=drafter,
        tree=tree.kind,
        draft=draft.mode,
        verifier=verifier,
    )
    _pour(stream)
    _remark(stream, verifier)


def chat(
    heads: Heads,
    drafter: DrafterName = "heads+ngram",
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = 0,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    tree: Tree = TreeChoice.tuned,
    draft: Draft = DraftChoice.auto,
    verifier: VerifierName = "auto",
    dtype: DtypeOption = Dtype.auto,
    target: TargetOption = None,
    any_target: AnyTarget = False,
    revision: Revision = None,
) -> None:
    """Talk with the target; after each answer its tokens/s and accepted length (τ).

    Example: headstart chat runs/quickstart
    """
    decoder = load_decoder(heads, target, revision, dtype, any_target)
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
            stream = decoder.stream(
                asked,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                seed=seed,
                drafter=drafter,
                tree=tree.kind,
                draft=draft.mode,
                verifier=verifier,
            )
            answer = _pour(stream)
            _remark(stream, verifier)
        except UserError as error:
            complain(error.problem, f"{error.remedy} /new begins anew.")
            continue
        except KeyboardInterrupt:
            console.print("\nStopped this answer.", style="dim")
            continue
        messages = [*asked, {"role": "assistant", "content": answer}]


def load_decoder(
    heads: str, target: str | None, revision: str | None, dtype: Dtype, any_target: bool = False
) -> Decoder:
    """Heads and their target, ready to generate; a spinner says that it takes a while."""
    console = Console(stderr=True)
    with console.status("loading"):
        from headstart.api import load

        return load(heads, target, revision, dtype.value, any_target=any_target)


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


def _remark(stream: Stream, verifier: str) -> None:
    """What a reader of the text should know about how it came to be."""
    from headstart.decode.rules import RULES

    console = Console(stderr=True)
    if verifier in RULES and not RULES[verifier].lossless:
        console.print(f"LOSSY: the verifier {verifier} changes what the target would have said.", style="yellow")
    if stream.answer is not None and stream.answer.drafter_error:
        console.print(
            f"The drafter failed ({stream.answer.drafter_error}); decoding went on plainly.",
            style="yellow",
            markup=False,
            soft_wrap=True,
        )
