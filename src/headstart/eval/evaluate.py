"""`evaluate`: the same prompts through every method, in turn, and what came of it.

Machines drift: clocks throttle and neighbours come and go. So the methods take turns on each prompt, and start from
another one on the next prompt; a slow minute then hurts all of them alike. Speed-ups are ratios of total throughput
with paired bootstrap intervals. The plain loop is the baseline in the same runtime, `transformers.generate` the one
that users have today, and its prompt lookup the strongest one that needs no training.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from rich.console import Console

from headstart.data.prompts.chat import check_template, has_template, prompt_tokens
from headstart.data.prompts.questions import Question
from headstart.decode.budget import Costs
from headstart.decode.loop import Drafter, check
from headstart.decode.options import DecodeOptions
from headstart.errors import UserError
from headstart.eval.bits import count_bits
from headstart.eval.divergence import Judge, Judgement
from headstart.eval.environment import dtype_name, environment
from headstart.eval.figures import RESAMPLES, Prompt, Unit, categories, compare_rows, per_prompt, summarise
from headstart.eval.labels import HEADS, LOOKUP, OTHER, PLAIN, STOCK
from headstart.eval.methods import ASSISTANT, Drafters, Method, Ours, Transformers, named, wanted
from headstart.support.terminal import progress_bar
from headstart.target.loading import load_target
from headstart.target.model import Target

SCHEMA_VERSION = 1
"""Of results.json; raised when a key changes its meaning or goes."""
_NOT_OF_RESULTS = ("processors", "stop", "raw", "ignore_end", "stop_test")
"""Options of decoding that measuring does not take."""
WARM_UP_TOKENS = 32
"""Most tokens of the unmeasured generation that each method starts with."""


@dataclass(frozen=True)
class EvalOptions(DecodeOptions):
    """How to measure: `DecodeOptions` for every method as far as they apply to it, and what else there is to say.

    Attributes:
        drafter: the one under test.
        limit: questions at most; None for all.
        batch_size: prompts decoded together. transformers' prompt lookup takes one only and is left out above 1.
        multi_turn: ask every turn, after the plain loop's answers to the earlier ones; without it the first only.
        prompt_lookup_tokens: drafts per round of transformers' prompt lookup.
        baselines: measure transformers too; without it those entries are null.
        predicted_speedup: what tuning promised over the plain loop, to stand beside what was measured.
        heads_name: what the report calls the heads.
        compare: other drafters to measure in the same turns, by name; `transformers_assistant:SPEC` is transformers'
            own assisted generation with the model SPEC.
    """

    drafter: str = "heads"
    limit: int | None = None
    batch_size: int = 1
    multi_turn: bool = False
    prompt_lookup_tokens: int = 4
    baselines: bool = True
    predicted_speedup: float | None = None
    heads_name: str = "heads"
    compare: tuple[str, ...] = ()


class Source(Drafters, Protocol):
    """What is measured: `headstart.decoder.Decoder`."""

    @property
    def target(self) -> Target: ...

    @property
    def calibration(self) -> dict[str, Any]: ...


def evaluate(
    target: Target,
    drafter: Drafter | None,
    questions: Sequence[Question],
    options: EvalOptions | None = None,
    progress: Console | None = None,
    costs: Costs | None = None,
    others: Mapping[str, Drafter | None] | None = None,
) -> dict[str, Any]:
    """Measure a drafter on questions against the plain loop and transformers.

    Args:
        target: the frozen model, with a tokenizer; without a chat template the text of a question is read as it is.
        drafter: the one under test; None measures plain decoding against itself.
        questions: what to ask.
        options: how to measure.
        progress: where to draw a progress bar; None for none.
        costs: of verifying on this machine, for drafters that budget.
        others: for each name of `options.compare` that is ours, what drafts.

    Returns:
        The content of results.json: schema_version, summary, compare, categories, settings, environment, per_prompt.

    Raises:
        UserError: no questions, an option out of range, a target without a tokenizer, several turns for one without a
            chat template, or a question that does not fit the context; all before anything runs.
    """
    options = options or EvalOptions()
    _check_options(target, options)
    questions = list(questions)[: options.limit]
    if not options.multi_turn:
        questions = [replace(question, turns=question.turns[:1]) for question in questions]
    if not questions:
        raise UserError("There are no questions.", "Give a question file with at least one line, or raise --limit.")
    if target.tokenizer is None or options.multi_turn:  # a target without a template can go on with a text, once
        check_template(target.tokenizer)
    elif progress is not None and not has_template(target.tokenizer):
        progress.print(f"{target.name} has no chat template: it goes on with each question as it is.", style="dim")
    for question in questions:
        _check_fits(target, question, options)

    methods = make_methods(target, drafter, options, costs, others or {})
    units = _measure(target, questions, options, methods, progress)
    judged = _judge(target, units, options, list(methods), progress)
    summary, rows = summarise(units, options.seed), per_prompt(units)
    for difference in judged[HEADS].differences:
        rows[difference.prompt]["divergence"] = difference.to_json()
    answers = [pair for unit in units for pair in zip(_tokens(unit), unit.runs[PLAIN].tokens, strict=True)]
    compared = {name: judged[name].to_json() for name in methods if options.temperature == 0}
    summary |= {
        "divergences": judged[HEADS].to_json(),
        "transformers_divergences": compared.get(STOCK),
        "prompt_lookup_divergences": compared.get(LOOKUP),
        "bits": asdict(count_bits(target, answers)),
        "predicted_speedup": options.predicted_speedup,
        "drafter": options.drafter,
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "summary": summary,
        "compare": compare_rows(units, judged, options.seed, options.drafter),
        "categories": categories(units, options.seed),
        "settings": _settings(target, drafter, len(questions), options, methods),
        "environment": environment(target),
        "per_prompt": rows,
    }


def evaluate_decoder(
    source: Source,
    questions: Sequence[Question],
    options: EvalOptions | None = None,
    progress: Console | None = None,
) -> dict[str, Any]:
    """`evaluate`, with drafters found by the names in the options.

    Names to compare may be comma-separated, and "all" stands for several, see `headstart.eval.methods.wanted`.

    Raises:
        UserError: as `evaluate`, or an unknown drafter.
    """
    options = options or EvalOptions()
    name, tree = options.drafter, options.tree
    drafter = source.drafter(name, tree)
    if tree is not None and "heads" in name.split("+"):
        name = tree if name == "heads" else f"{name} ({tree})"
    compare = wanted(options.compare, name)
    predicted = source.calibration.get("predicted", {}).get("speedup") if name == "heads" else None
    tuned_dtype = source.calibration.get("settings", {}).get("dtype")
    if options.temperature > 0 or options.batch_size > 1 or tuned_dtype != dtype_name(source.target):
        predicted = None  # tuning spoke of greedy decoding, one prompt at a time, in the dtype it ran in
    others = {other: named(source, other) for other in compare if not other.startswith(ASSISTANT)}
    options = replace(options, drafter=name, compare=compare, predicted_speedup=predicted)
    return evaluate(source.target, drafter, questions, options, progress, source.costs, others)


# -- running ---------------------------------------------------------------------------------------------------------


def make_methods(
    target: Target,
    drafter: Drafter | None,
    options: EvalOptions,
    costs: Costs | None = None,
    others: Mapping[str, Drafter | None] | None = None,
) -> dict[str, Method]:
    """Every way of decoding that the options ask for, by its name among the runs; see `evaluate`."""
    methods: dict[str, Method] = {
        HEADS: Ours(target, drafter, options, costs),
        PLAIN: Ours(target, None, options),
    }
    if options.baselines:
        methods[STOCK] = Transformers(target, options)
        if options.batch_size == 1:
            methods[LOOKUP] = Transformers(target, options, options.prompt_lookup_tokens)
    for name in options.compare:
        if name.startswith(ASSISTANT):
            assistant = load_target(name.removeprefix(ASSISTANT), dtype_name(target), str(target.device))
            methods[OTHER + name] = Transformers(target, options, assistant=assistant)
        else:
            methods[OTHER + name] = Ours(target, (others or {})[name], options, costs)
    return methods


def _measure(
    target: Target,
    questions: Sequence[Question],
    options: EvalOptions,
    methods: dict[str, Method],
    console: Console | None,
) -> list[Unit]:
    units: list[Unit] = []
    ordered = list(methods)
    total = sum(len(question.turns) for question in questions)
    with progress_bar(console, "warming up", total) as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for group, first in enumerate(range(0, len(questions), options.batch_size)):
            for prompts in _conversations(target, questions[first : first + options.batch_size], units):
                tokens = [prompt.tokens for prompt in prompts]
                seed = options.seed + len(units) * options.batch_size
                if not units:
                    for method in methods.values():
                        method.run(tokens, min(WARM_UP_TOKENS, options.max_new_tokens), seed)
                start = len(units) % len(ordered)
                runs = {}
                for name in ordered[start:] + ordered[:start]:
                    bar.update(title=f"{prompts[0].id}: {name.removeprefix(OTHER)}")
                    runs[name] = methods[name].run(tokens, options.max_new_tokens, seed)
                units.append(Unit(group, prompts, runs))
                bar.advance(len(prompts), note=_speeds(units))
    return units


def _conversations(target: Target, questions: Sequence[Question], units: list[Unit]) -> Iterator[list[Prompt]]:
    """The prompts of a batch of questions, turn by turn; a later turn reads the plain answers of the unit before."""
    messages: list[list[dict[str, str]]] = [[] for _ in questions]
    for turn in range(max(len(question.turns) for question in questions)):
        prompts, numbers = [], [number for number, question in enumerate(questions) if turn < len(question.turns)]
        for number in numbers:
            messages[number].append({"role": "user", "content": questions[number].turns[turn]})
            name = str(questions[number].question_id) + (f"/{turn + 1}" if turn else "")
            tokens = prompt_tokens(messages[number], target.tokenizer)
            prompts.append(Prompt(name, questions[number].category, tokens))
        yield prompts
        for number, answer in zip(numbers, units[-1].runs[PLAIN].tokens, strict=True):
            text = target.tokenizer.decode(answer, skip_special_tokens=True)
            messages[number].append({"role": "assistant", "content": text})


def _speeds(units: Sequence[Unit]) -> str:
    """Throughput so far, for the progress bar."""
    heads, plain = (
        sum(unit.runs[name].count for unit in units) / sum(unit.runs[name].seconds for unit in units)
        for name in (HEADS, PLAIN)
    )
    return f"{heads:.1f} tokens/s, plain {plain:.1f} ({heads / plain:.2f}x)"


# -- judging ---------------------------------------------------------------------------------------------------------


def _judge(
    target: Target, units: Sequence[Unit], options: EvalOptions, names: Sequence[str], console: Console | None
) -> dict[str, Judgement]:
    """How each method's words compare with the plain loop's; sampled ones do not: each draws its own random numbers."""
    if options.temperature != 0:
        return dict.fromkeys(names, Judgement())
    say = partial(console.print, style="dim", highlight=False, soft_wrap=True) if console is not None else None
    judge = Judge(target, options, say)
    prompts = [tokens for unit in units for tokens in _tokens(unit)]
    outputs = {name: [tokens for unit in units for tokens in unit.runs[name].tokens] for name in names}
    return {name: judge.judge(prompts, outputs[PLAIN], outputs[name]) for name in names}


def _tokens(unit: Unit) -> list[list[int]]:
    return [prompt.tokens for prompt in unit.prompts]


# -- settings and checks ---------------------------------------------------------------------------------------------


def _settings(
    target: Target,
    drafter: Drafter | None,
    questions: int,
    options: EvalOptions,
    methods: dict[str, Method],
) -> dict[str, Any]:
    return {
        **{name: value for name, value in asdict(options).items() if name not in _NOT_OF_RESULTS},
        "target": target.name,
        "target_fingerprint": target.identity().fingerprint,
        **({} if target.quantization == "none" else {"quantization": target.quantization}),
        **({} if target.adapter is None else {"adapter": {"hash": target.adapter.hash, **target.adapter.note}}),
        "tree_nodes": drafter.max_nodes if drafter is not None else 1,
        "questions": questions,
        "methods": [name.removeprefix(OTHER) for name in methods],
        "order": "rotated from prompt to prompt",
        "warm_up_tokens": min(WARM_UP_TOKENS, options.max_new_tokens),
        "bootstrap_resamples": RESAMPLES,
        "margin_rule": (
            "both tokens within 0.001 of the best float32 logit"
            if target.dtype in (torch.float32, torch.float64)
            else "both tokens within the margin of the best float32 logit; the margin is the largest error, measured "
            "on these texts, that this dtype makes in the gap between two leading logits"
        ),
    }


def _check_options(target: Target, options: EvalOptions) -> None:
    for name in ("limit", "max_new_tokens", "batch_size", "prompt_lookup_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}.", "Give a number of at least 1.")
    check(target, [[0]], replace(options, max_new_tokens=1))
    if options.batch_size > 1 and any(name.startswith(ASSISTANT) for name in options.compare):
        raise UserError(
            "transformers' assisted generation takes one prompt at a time.", "Use --batch-size 1, or leave it out."
        )


def _check_fits(target: Target, question: Question, options: EvalOptions) -> None:
    """Refuse a question that passes the context, with every answer at its longest."""
    if not question.turns:
        raise UserError(f"Question {question.question_id} has no turns.", "Give each question at least one turn.")
    messages: list[dict[str, str]] = []
    for turn in question.turns:
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": ""}]
    length, new = len(prompt_tokens(messages[:-1], target.tokenizer)), len(question.turns) * options.max_new_tokens
    if length + new > target.max_length:
        raise UserError(
            f"Question {question.question_id} has {length} tokens; with {new} new ones it passes the "
            f"{target.max_length} tokens that {target.name} can read.",
            "Leave it out, or lower --max-new-tokens.",
        )
