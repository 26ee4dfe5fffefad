"""Commands that take heads: eval, audit, generate, chat, race. Imports inside functions, as in `headstart.cli.app`."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

from headstart.cli.options import HEADS, Follow, Heads, Loading, Log, Overwrite, check_engine_options, with_options
from headstart.decode.options import DecodeKeywords, DecodeOptions, ServingOptions
from headstart.errors import UserError, check_text
from headstart.eval.options import AuditedEngine, AuditOptions, EvalOptions
from headstart.support.files import check_writable, read_jsonl
from headstart.support.terminal import ACCEPTED, ask, complain, format_seconds, progress_bar, say, tell

if TYPE_CHECKING:
    from headstart.api import Decoder, Stream
    from headstart.data.prompts.shapes import Prompt

_BATCH = 32
"""Prompts of a file decoded together; their answers are written before the next batch."""
PromptOption = Annotated[str | None, typer.Option("--prompt", help="The prompt; - reads it from standard input.")]
_CHAT_HELP = "/new starts over, /drafts colours accepted drafts, /help shows this, an empty line or Ctrl-D quits."


@with_options(without=("stop", "raw", "logprobs"))
def evaluate(
    heads: Heads,
    questions: Annotated[
        str,
        typer.Option(
            "--questions",
            "--suite",
            metavar="FILE|SUITE",
            help='JSONL with {"turns": ["..."]} a line; or mt-bench, humaneval, gsm8k, spec-bench, speed-bench, '
            "speed-bench-1k (2k, 8k, 16k, 32k) or alpaca, from the Hub, with every turn; speed-bench:coding is a part. "
            "Of gsm8k, alpaca and speed-bench-1k some questions, unless --limit says more.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Write results.json, report.md and report.html into this folder.")],
    overwrite: Overwrite = False,
    options: EvalOptions = EvalOptions(),
    loading: Loading = Loading(),
    serving: ServingOptions = ServingOptions(),
) -> None:
    """Measure heads on questions, alone and with n-grams, against plain decoding, transformers and others.

    With --engine, measure a serving engine instead, with and without heads; a batch is that many requests at a time.

    Example: headstart eval runs/quickstart --questions questions.jsonl --out report --compare all

    Example: headstart eval runs/quickstart --suite mt-bench --out report

    Example: headstart eval runs/quickstart --suite mt-bench --out report --engine vllm --sweep-batch 4,16
    """
    from headstart.data.prompts.questions import find_questions

    check_engine_options(serving, loading, but=("target", "revision"))
    _check_out(out, ("results.json", "report.md", "report.html"), overwrite)
    found, of_suite = find_questions(questions, options.limit)
    from headstart.eval.report import show_results, write_report
    from headstart.hub.engine_tuning import read_engine_tunings
    from headstart.hub.format import read_config
    from headstart.hub.pull import has_heads, locate
    from headstart.pipeline.actions import report

    console, name = Console(), Path(questions).name
    multi_turn = options.multi_turn or (of_suite and any(len(question.turns) > 1 for question in found))
    measuring = replace(options, heads_name=heads, questions_name=name, multi_turn=multi_turn)
    if serving.engine:
        from headstart.pipeline.in_engine import evaluate_in_engine

        located = locate(heads, loading.revision)
        results = evaluate_in_engine(located, found, measuring, serving, loading.target, console)
        write_report(results, out)
    else:
        # The default drafter is measured along with the heads alone.
        default = (DecodeOptions.drafter,) if options.drafter == "heads" else ()
        measuring = replace(measuring, compare=(*default, *options.compare))
        decoder = load_decoder(heads, loading, options)
        folder = locate(heads, loading.revision) if has_heads(heads) else None
        training = read_config(folder).get("training") if folder else None
        engines = read_engine_tunings(folder) if folder else {}
        results = report(decoder, found, measuring, out, console, training, engines)
    show_results(results, f"{heads} on {name}", console)
    say(console, ("Report", out / "report.html"))


@with_options()
def audit(
    heads: Heads,
    questions: Annotated[
        list[Path] | None,
        typer.Option(help="JSONL with questions; may be repeated.", show_default="a few of headstart's own"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write audit.json and audit.md into this folder.")] = None,
    overwrite: Overwrite = False,
    options: AuditOptions = AuditOptions(),
    loading: Loading = Loading(),
    serving: AuditedEngine = AuditedEngine(),
) -> None:
    """Prove on your own target and heads that drafting does not change the output. Exits with 1 if it does.

    The proof holds in float32 (the default here), and in bfloat16 with --exact bits. Engines are audited in bfloat16.

    Greedy decoding must write the same tokens with every drafter as without. Sampling must draw each token as often as
    transformers does, with every verifier.

    With --engine, check a serving engine with the heads instead: its greedy tokens must be the target's, and it must
    accept as many drafts as a replay of the heads on its answers. If it does not, the audit names the likely cause.

    Example: headstart audit runs/quickstart --out audit

    Example: headstart audit runs/quickstart --engine vllm --out audit-vllm

    Example: headstart audit runs/quickstart --engine http://localhost:8000
    """
    from headstart.data.prompts.questions import read_questions

    check_engine_options(serving, loading, but=vars(loading))

    if out is not None:
        _check_out(out, ("audit.json", "audit.md"), overwrite)
    texts = [question.turns[0] for file in questions or () for question in read_questions(file)]
    from headstart.eval.audit import PROMPTS, run_audit
    from headstart.eval.audit_report import show_audit, write_audit

    console = Console()
    options = replace(options, heads_name=heads)
    if loading.dtype == "auto":
        loading = replace(loading, dtype="bfloat16" if serving.engine else "float32")
    if serving.engine:
        from headstart.hub.pull import locate
        from headstart.pipeline.engine_audit import audit_in_engine

        load = partial(load_decoder, heads, loading)
        located = locate(heads, loading.revision)
        results = audit_in_engine(located, texts, options, serving, loading.target, load, console)
    else:
        decoder = load_decoder(heads, loading)
        prompts = [decoder.tokens(text, options.raw) for text in (texts or PROMPTS)[: options.limit]]
        results = run_audit(decoder, prompts, options, console)
    show_audit(results, console)
    if out is not None:
        write_audit(results, out)
        say(console, ("Evidence", out / "audit.md"))
    if not results["clean"]:
        raise typer.Exit(1)


@with_options()
def generate(
    heads: Heads,
    prompt: PromptOption = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Instead: JSONL of any shape that data.prompts takes. Answers are JSON lines in its order."),
    ] = None,
    options: DecodeOptions = DecodeOptions(),
    loading: Loading = Loading(),
) -> None:
    """Answer a prompt, or each prompt of a file. The text goes to stdout, the figures to stderr.

    With --logprobs the answer to a prompt is a JSON line, too.

    Example: headstart generate runs/quickstart --prompt "Why is the sky blue?"

    Example: headstart generate runs/quickstart --prompts questions.jsonl > answers.jsonl
    """
    if (prompt is None) == (prompts is None):
        raise UserError("generate takes --prompt or --prompts.", "Give one of the two.")
    text = None if prompt is None else read_prompt(prompt, options.raw)
    if text is not None and options.logprobs is None:
        _print_stream(load_decoder(heads, loading, options).stream(text, **_keywords(options)))
        return
    from headstart.data.prompts.shapes import Prompt

    requests = read_prompts(prompts) if prompts is not None else [Prompt([{"role": "user", "content": text}])]
    _answer_all(load_decoder(heads, loading, options), requests, options)


@with_options(without=("stop", "logprobs"), max_new_tokens=512)
def chat(
    heads: Heads,
    options: DecodeOptions = DecodeOptions(),
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    log: Log = None,
    follow: Follow = False,
    loading: Loading = Loading(),
) -> None:
    """Chat with the target. Each answer is followed by its tokens/s and its tokens per round (τ).

    With --raw the target continues each line as plain text.

    Example: headstart chat runs/quickstart
    """
    check_text(system or "", "The system prompt")
    if system and options.raw:
        raise UserError("--raw passes each line as it is, without a system prompt.", "Leave out --raw or --system.")
    decoder = load_decoder(heads, replace(loading, log=log, follow=follow), options)
    if not options.raw:
        decoder.check_template()
    console = Console(stderr=not sys.stdin.isatty())  # in a pipe, stdout holds the answers alone
    tell(console, f"{decoder.target.name}. {_CHAT_HELP}", style="dim")
    opening = [{"role": "system", "content": system}] if system else []
    messages, shows_drafts = opening, False
    while text := _from_stdin(partial(ask, console)):
        if text == "/help":
            tell(console, _CHAT_HELP, style="dim")
            continue
        if text == "/drafts":
            shows_drafts = not shows_drafts
            tell(console, f"Accepted drafts are {'coloured' if shows_drafts else 'no longer coloured'}.", style="dim")
            continue
        if text == "/new":
            messages = opening
            continue
        request = [*messages, {"role": "user", "content": text}]
        try:
            stream = decoder.stream(text if options.raw else request, **_keywords(options))
            answer = _print_stream(stream, shows_drafts)
        except UserError as error:
            complain(error.problem, f"{error.remedy} /new starts over.")
            continue
        except KeyboardInterrupt:
            console.print("\nStopped this answer.", style="dim")
            continue
        messages = [*request, {"role": "assistant", "content": answer}]


@with_options(without=("logprobs",))
def race(
    heads: Annotated[str | None, HEADS] = None,
    prompt: PromptOption = None,
    results: Annotated[
        Path | None, typer.Option("--from", help="Show a race from this results.json of a report instead.")
    ] = None,
    prompt_id: Annotated[
        str | None, typer.Option(help="With --from: show this prompt, by default the prompt with the median speed-up.")
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


def read_prompt(prompt: str, raw: bool) -> str:
    """Return the typed prompt, or standard input for "-"; a UserError if it is empty or not text."""
    if prompt == "-":
        prompt = _from_stdin(sys.stdin.read).removesuffix("\n")
    check_text(prompt, "The prompt")
    if not (prompt if raw else prompt.strip()):
        raise UserError("The prompt is empty.", "Give a question: --prompt TEXT.")
    return prompt


def read_prompts(path: Path) -> list[Prompt]:
    """Read the prompts of a JSONL file in order; a UserError names the line of an unusable record."""
    from headstart.data.prompts.chat import Unusable
    from headstart.data.prompts.shapes import SHAPES, parse_prompt

    prompts = []
    for number, row in read_jsonl(path):
        try:
            prompts.append(parse_prompt(row, f"line {number}"))
        except (Unusable, ValueError) as error:
            problem = f"a prompt {error}" if isinstance(error, Unusable) else str(error)
            raise UserError(f"{path}, line {number}: {problem}.", f"Write {SHAPES[4]} or {SHAPES[0]}.") from None
    if not prompts:
        raise UserError(f"{path} holds no prompt.", f"Write one {SHAPES[4]} a line.")
    return prompts


def _answer_all(decoder: Decoder, prompts: Sequence[Prompt], options: DecodeOptions) -> None:
    """Write the answer to each prompt's first request to stdout as JSON lines, in batches."""
    from headstart.decode.loop import check

    for prompt in prompts:
        if options.raw and len(prompt.opening) > 1:
            raise UserError(
                f"--raw takes one text as it is, and the prompt {prompt.id} has {len(prompt.opening)} messages.",
                "Leave out --raw, or give one text.",
            )
    tokens = [
        decoder.tokens(
            prompt.turns[0] if prompt.plain or options.raw else prompt.opening,
            prompt.plain or options.raw,
            prompt.tools or options.tools,
            options.chat_template_kwargs,
        )
        for prompt in prompts
    ]
    check(decoder.target, tokens, options)  # every prompt, before the first is answered
    console, start, count, rounds, verified = Console(stderr=True), perf_counter(), 0, 0, 0.0
    with progress_bar(console, "answers", len(prompts)) as bar:
        for first in range(0, len(tokens), _BATCH):
            seeded = options if options.seed is None else replace(options, seed=options.seed + first)
            answers = decoder.generate_batch(tokens[first : first + _BATCH], **_keywords(seeded))
            for prompt, answer in zip(prompts[first:], answers, strict=False):
                count, rounds = count + len(answer.tokens), rounds + answer.rounds
                verified += answer.tokens_per_round * answer.rounds
                line = {
                    "id": prompt.id,
                    "text": answer.text,
                    "tokens": len(answer.tokens),
                    "finish_reason": answer.finish_reason,
                    "tokens_per_round": round(answer.tokens_per_round, 2),
                    **({} if answer.seed is None else {"seed": answer.seed}),
                    **({} if answer.logprobs is None else {"logprobs": answer.logprobs}),
                }
                sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")
            sys.stdout.flush()
            bar.advance(len(answers))
    seconds = perf_counter() - start
    figures = f"{count} tokens in {format_seconds(seconds)}, {count / seconds:.1f} tokens/s"
    answered = f"{len(prompts)} answer{'s' * (len(prompts) != 1)}"
    tell(console, f"{answered}, {figures}, τ {verified / rounds if rounds else 1:.2f}", style="dim")


def _keywords(options: DecodeOptions) -> DecodeKeywords:
    return cast(DecodeKeywords, {name: getattr(options, name) for name in DecodeKeywords.__annotations__})


def _from_stdin(read: Callable[[], str]) -> str:
    """Read standard input; a UserError if it is not UTF-8."""
    try:
        text = read()
    except UnicodeDecodeError as error:
        raise UserError(f"Standard input is not UTF-8: {error.reason}.", "Convert it to UTF-8.") from None
    check_text(text, "Standard input")
    return text


def load_decoder(heads: str, loading: Loading, options: DecodeOptions = DecodeOptions()) -> Decoder:
    """Check the options, then load heads and their target, or a target alone if the drafter needs no heads."""
    console = Console(stderr=True)
    with console.status("loading"):
        from headstart.decode.loop import check_options
        from headstart.drafters.catalog import check_drafter

        check_options(options)
        check_drafter(options.drafter)
        for name in ("top_p", "top_k", "min_p"):
            if options.greedy and getattr(options, name) != getattr(DecodeOptions, name):
                option = f"--{name.replace('_', '-')}"
                tell(console, f"{option} has no effect without --temperature.", style="yellow")
        from headstart.api import load

        if _is_target(heads, options.drafter, loading):
            return load(**{**vars(loading), "target": loading.target or heads})
        return load(heads, **vars(loading))


def _is_target(heads: str, drafter: str, loading: Loading) -> bool:
    """Whether `heads` names a target, and the drafter needs no heads."""
    from headstart.drafters.catalog import parts_of
    from headstart.hub.engines.export import is_published
    from headstart.hub.format import is_ours
    from headstart.hub.pull import has_heads, locate
    from headstart.model.loading import PACKAGED

    if {"heads", "memory"} & set(parts_of(drafter)) or has_heads(heads):
        return False
    path = Path(heads).expanduser()
    if path.exists():
        heads_of_others = loading.target is not None and is_published(path)
        return not heads_of_others and (path.is_file() or ((path / "config.json").is_file() and not is_ours(path)))
    return heads in PACKAGED or not has_heads(str(locate(heads, loading.revision)))


def _print_stream(stream: Stream, shows_drafts: bool = False) -> str:
    """Write a stream's text to stdout piece by piece, then its figures to stderr; returns the text."""
    colours = ColorSystem.STANDARD if shows_drafts and Console().color_system else None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "A drafter failed")  # reported below, with the figures
            for piece in stream:
                sys.stdout.write(Style.parse(ACCEPTED).render(piece[: stream.drafted], color_system=colours))
                sys.stdout.write(piece[stream.drafted :])
                sys.stdout.flush()
    finally:
        stream.close()
        sys.stdout.write("\n")
        sys.stdout.flush()
    answer = stream.answer
    assert answer is not None, "a stream that ran to its end has an answer"
    console = Console(stderr=True)
    figures = f"{len(answer.tokens)} tokens, {answer.tokens_per_second:.1f} tokens/s, τ {answer.tokens_per_round:.2f}"
    if answer.paused_rounds:
        all_paused = answer.paused_rounds == answer.rounds
        figures += (
            ", nothing was drafted: plain decoding was faster here"
            if all_paused
            else f", {answer.paused_rounds} of {answer.rounds} rounds without drafts"
        )
    seed = "" if answer.seed is None else f", --seed {answer.seed}"
    tell(console, f"{figures}, first token after {answer.first_token_ms:.0f} ms{seed}", style="dim")
    if answer.drafter_error:
        tell(console, f"A drafter failed ({answer.drafter_error}); decoding went on without it.", style="yellow")
    return answer.text


def _check_out(out: Path, files: Sequence[str], overwrite: bool) -> None:
    """Refuse (UserError) a folder that is not writable or holds a report, before anything is measured."""
    existing = ", ".join(name for name in files if (out / name).exists())
    if existing and not overwrite:
        raise UserError(f"{out} already holds a report ({existing}).", "Choose another folder, or add --overwrite.")
    check_writable(out)
