"""`evaluate`: run the same prompts through every method, and compare.

Machines drift: clocks throttle and other load varies. So the methods alternate on each prompt, with a rotating start,
and a slow minute affects all of them alike. transformers takes most of the time, and the speed-ups over it are large,
so fewer prompts suffice: it answers one in four if there are enough. Speed-ups are ratios of total throughput with
paired bootstrap intervals. Baselines are the plain loop in the same runtime, `transformers.generate`, and its prompt
lookup, the strongest one that needs no training.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import count, takewhile
from time import perf_counter
from typing import Any, cast

from rich.console import Console

from headstart.data.prompts.chat import (
    check_template,
    has_template,
    prompt_tokens,
    template_kwargs,
    with_template_kwargs,
    with_tools,
)
from headstart.data.prompts.questions import Question
from headstart.decode.costs import Measured
from headstart.decode.drafting import Drafter
from headstart.decode.loop import check, check_options
from headstart.decode.options import TreeKind, meaning
from headstart.drafters.catalog import parts_of
from headstart.errors import UserError
from headstart.eval import figures
from headstart.eval.divergence import Judge, Judgement, Texts
from headstart.eval.environment import environment
from headstart.eval.figures import LEAST_UNITS, Prompt, Unit, units_with
from headstart.eval.labels import HEADS, LOOKUP, OTHER, PLAIN, STOCK
from headstart.eval.methods import LOOKUP_TOKENS, Method, Ours, Source, Transformers, drafters_named, expand, warm_up
from headstart.eval.options import EvalOptions
from headstart.eval.replay import races, token_texts
from headstart.model.frozen import FrozenModel
from headstart.support.terminal import format_seconds, progress_bar, tell
from headstart.tree.tree import TreeShape
from headstart.tuning.tune import Tuning, path_prob

SCHEMA_VERSION = 2  # of results.json; raised when a key changes its meaning or is removed
_OMITTED_OPTIONS = ("processors", "stop", "raw", "tools", "chat_template_kwargs", "ignore_end", "stop_test")
"""Decoding options that do not apply to measuring, left out of `settings`."""
_CONTEXT, _CONTINUATION = 16, 12  # tokens shown of two answers before and after they diverge
_SWEEP_FIGURES = (
    *("tokens_per_second", "speedup_vs_plain", "tokens_per_round", "nodes_per_round", "round_ms", "ttft_ms"),
    *("acceptance_by_position", "rounds_by_position", "undrafted_prompts", "prompts", "drafter_error"),
)
"""Figures kept of a drafter at other batch sizes and prompt lengths."""
_CHARACTERS = 16  # maximum per token: longer documents are cut before they are tokenised
_EVERY = 4
"""transformers answers one in four questions or batches, and more if it would otherwise have no interval."""
_TREE_NODES = 15  # maximum nodes of the reported tree: further ones are rarely accepted


def evaluate(
    source: Source, questions: Sequence[Question], options: EvalOptions | None = None, console: Console | None = None
) -> dict[str, Any]:
    """Measure the drafter in the options on questions, against the plain loop and transformers.

    A target without a chat template continues the text of each question.

    Returns the content of results.json: schema_version, summary, compare, categories, prompt_lengths, places, batches,
    contexts, tuned (see `tuning_record`), settings, environment, per_prompt and replays (of a few prompts, see
    `headstart.eval.replay`). Raises UserError, before anything runs, for settings that cannot be measured.
    """
    options = options or EvalOptions()
    target = source.target
    tokenizer = with_template_kwargs(target.tokenizer, options.chat_template_kwargs or {})
    given, questions = questions, select_questions(target, tokenizer, questions, options, console)
    check(target, [[0]], replace(options, max_new_tokens=1, min_new_tokens=0))  # lengths are checked already
    drafters = source.drafters(options.drafter, options.tree)
    drafter = tested = options.drafter
    if options.tree is not None and "heads" in tested.split("+"):
        tested = options.tree if tested == "heads" else f"{tested} ({options.tree})"
    options = replace(options, drafter=tested, compare=expand(options.compare, tested))
    others = {name: drafters_named(source, name) for name in options.compare}
    methods = make_methods(source, drafters, others, options)
    judge = Judge(target, options).judge
    results = measure_methods(target.with_tokenizer(tokenizer), questions, options, methods, judge, console, given)
    results["summary"]["predicted_speedup"] = _predicted(source, options)
    results["settings"] |= {
        **({} if target.quantization == "none" else {"quantization": target.quantization}),
        **({} if target.adapter is None else {"adapter": target.adapter.hash}),
        "prompt_lookup_tokens": LOOKUP_TOKENS,
        "tree_nodes": 1 + sum(drafter.max_nodes - 1 for drafter in drafters),
    }
    tuned = tuning_record(source, drafter, options.tree)
    return {**results, "tuned": tuned, "environment": environment(target, drafters)}


def measure_methods(
    target: FrozenModel,
    questions: Sequence[Question],
    options: EvalOptions,
    methods: Mapping[str, Method],
    judge: Callable[[Texts, Texts, Texts], Judgement],
    console: Console | None,
    given: Sequence[Question] = (),
) -> dict[str, Any]:
    """Measure methods on questions, `HEADS` against `PLAIN` and the others.

    Returns the content of results.json as `evaluate` does, without `tuned` and `environment`. `judge` compares prompts'
    plain and other answers. Long prompts are made of all `given` questions, asked or not.
    """
    tokenizer, tested = target.tokenizer, options.drafter
    units = _measure(target, questions, options, methods, console)
    ours = {name: method for name, method in methods.items() if not isinstance(method, Transformers)}
    batches = _batches(target, questions, options, ours, console)
    contexts = _contexts(target, given, units, options, ours, console)
    judged = _judge(judge, units, options, list(methods), console)
    summary, rows = figures.summarise(units, options.seed), figures.per_prompt(units, tested)
    answers = [pair for unit in units for pair in zip(unit.runs[PLAIN].tokens, unit.runs[HEADS].tokens, strict=True)]
    for difference in judged[HEADS].differences:
        texts = _texts(tokenizer, *answers[difference.prompt], difference.position)
        rows[difference.prompt]["divergence"] = difference.to_json() | texts
    summary |= {"divergences": judged[HEADS].to_json(), "predicted_speedup": None, "drafter": tested}
    settings = {
        **{name: value for name, value in asdict(options).items() if name not in _OMITTED_OPTIONS},
        "target": target.name,
        "target_fingerprint": target.identity().fingerprint,
        **({"chat_template_kwargs": variables} if (variables := template_kwargs(tokenizer)) else {}),
        "questions": len(questions),
        "methods": [name.removeprefix(OTHER) for name in methods],
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "summary": summary,
        "compare": figures.compare_rows(units, judged, options.seed, tested),
        "categories": figures.categories(units, options.seed),
        "prompt_lengths": figures.prompt_lengths(units, options.seed),
        "places": figures.places(units),
        "batches": batches,
        "contexts": contexts,
        "tuned": None,
        "settings": settings,
        "per_prompt": rows,
        "replays": races(units, tokenizer, tested),
    }


def ask_first(
    target: FrozenModel, questions: Sequence[Question], options: EvalOptions, plain: Method, console: Console
) -> None:
    """Run `plain` on everything that `measure_methods` runs it on, to record its answers."""
    _measure(target, questions, options, {PLAIN: plain}, console)
    _batches(target, questions, options, {PLAIN: plain}, console)


def _predicted(source: Source, options: EvalOptions) -> float | None:
    """Return tuning's predicted speed-up over plain, if it applies: the heads alone with the tree that tuning chose,
    greedy, batch size 1, same dtype."""
    tuned_dtype = source.calibration.get("settings", {}).get("dtype")
    comparable = options.drafter == "heads" and options.temperature == 0 and options.batch_size == 1
    if not comparable or tuned_dtype != source.target.dtype_name:
        return None
    return cast("float | None", source.calibration.get("predicted", {}).get("speedup"))


def tuning_record(source: Source, drafter: str, tree: TreeKind | None) -> dict[str, Any] | None:
    """Return tuning's measurements of the heads, at this machine's costs of drafting; None if no tuned heads draft.

    `nodes` are (path of ranks, probability that all of it is accepted), likeliest first; the first `chosen` are the
    best static tree, or the best chain for kind "chain". `acceptance[depth][rank]` is how often that draft is right if
    the rank-0 drafts of all depths above were right; `kinds` is as in `Tuning`; `costs` are milliseconds, see `Costs`.
    """
    costs = source.costs
    if costs is None or "heads" not in parts_of(drafter) or not source.calibration.get("acceptance"):
        return None
    tuning = Tuning.from_json(source.calibration)
    if costs != tuning.costs:
        tuning = tuning.at_costs(Measured(costs, tuning.packed))
    kind = tree or tuning.tree
    paths = TreeShape.chain(tuning.chain).paths if kind == "chain" else tuning.ranked_paths[:_TREE_NODES]
    return {
        "tree": kind,
        "chosen": min(len(paths), tuning.chain if kind == "chain" else len(tuning.paths)),
        "nodes": [[list(path), round(path_prob(path, tuning.acceptance), 4)] for path in paths],
        "kinds": tuning.kinds,
        "acceptance": [[round(share, 4) for share in ranks] for ranks in tuning.acceptance],
        "costs": {
            name: [round(ms, 3) for ms in value] if isinstance(value, tuple) else round(value, 3)
            for name, value in asdict(costs).items()
        },
    }


def make_methods(
    source: Source, drafters: Sequence[Drafter], others: Mapping[str, Sequence[Drafter]], options: EvalOptions
) -> dict[str, Method]:
    """Return every measured way of decoding, by its name among the runs."""
    target, costs = source.target, source.costs
    methods: dict[str, Method] = {HEADS: Ours(target, drafters, options, costs), PLAIN: Ours(target, (), options)}
    if options.baselines:
        methods[STOCK] = Transformers(target, options)
        if options.batch_size == 1:
            methods[LOOKUP] = Transformers(target, options, lookup=True)
    return methods | {OTHER + name: Ours(target, other, options, costs) for name, other in others.items()}


def _measure(
    target: FrozenModel,
    questions: Sequence[Question],
    options: EvalOptions,
    methods: Mapping[str, Method],
    console: Console | None,
) -> list[Unit]:
    units: list[Unit] = []
    total = sum(len(question.turns) for question in questions)
    with progress_bar(console, "warming up", total) as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        firsts = range(0, len(questions), options.batch_size)
        every = max(1, min(_EVERY, len(firsts) // LEAST_UNITS))
        for group, first in enumerate(firsts):
            for prompts in _conversations(target, questions[first : first + options.batch_size], units):
                tokens = [prompt.tokens for prompt in prompts]
                seed = options.seed + len(units) * options.batch_size
                if not units:
                    for method in methods.values():
                        warm_up(method, tokens, options.max_new_tokens, seed)
                names = [name for name in methods if group % every == 0 or not isinstance(methods[name], Transformers)]
                start = len(units) % len(names)
                runs = {}
                for name in names[start:] + names[:start]:
                    bar.update(title=f"{prompts[0].id}: {name.removeprefix(OTHER)}")
                    runs[name] = methods[name].run(tokens, options.max_new_tokens, seed)
                units.append(Unit(group, prompts, runs))
                bar.advance(len(prompts))
    return units


def _batches(
    target: FrozenModel,
    questions: Sequence[Question],
    options: EvalOptions,
    methods: Mapping[str, Method],
    console: Console | None,
) -> list[dict[str, Any]]:
    """Measure on the same questions at other batch sizes: a row for each size and drafter."""
    rows = []
    for size in options.sweep_batch:
        units = _measure(target, questions, replace(options, batch_size=size), methods, console)
        rows += [{"batch_size": size, **row} for row in _drafter_rows(units, options)]
    return rows


def _contexts(
    target: FrozenModel,
    questions: Sequence[Question],
    units: Sequence[Unit],
    options: EvalOptions,
    methods: Mapping[str, Method],
    console: Console | None,
) -> list[dict[str, Any]]:
    """Measure on a few questions after documents, which end with the other questions and the plain answers to them.

    Returns a row for each prompt length and drafter, or with the reason why a length is left out.
    """
    pairs = [pair for unit in units for pair in zip(unit.prompts, unit.runs[PLAIN].tokens, strict=True)]
    answers = {prompt.question: target.text_of(answer) for prompt, answer in pairs}
    texts = ["\n\n".join(f"{turn}\n\n{answers.get(turn, '')}" for turn in each.turns).strip() for each in questions]
    most = min(options.limit or LEAST_UNITS, LEAST_UNITS)
    asked = range(0, len(questions), max(1, len(questions) // most))[:most]
    longest = min(options.long_context or 0, target.max_length - options.max_new_tokens)
    lengths = [*takewhile(lambda length: length < longest, (512 << doubling for doubling in count())), longest]
    rows: list[dict[str, Any]] = []
    for place, length in enumerate(lengths if options.long_context else (), start=1):
        start = perf_counter()
        try:
            prompts = [
                _after_document(questions[i], "\n\n".join([*texts[i + 1 :], *texts[:i]]), length, target.tokenizer)
                for i in asked
            ]
            measured = _measure(target, prompts, replace(options, batch_size=1), methods, console)
        except UserError as error:  # too little text or memory
            rows.append({"prompt_tokens": length, "left_out": error.problem})
            continue
        drafters = _drafter_rows(figures.after_prefill(measured), options)
        rows += [{"prompt_tokens": length, "left_out": "", **row} for row in drafters] or [
            {"prompt_tokens": length, "left_out": "Every answer ends with its first token."}
        ]
        if console is not None and (longer := lengths[place:]):
            left = format_seconds((perf_counter() - start) * sum(longer) / length)
            tell(console, f"    prompts of {length} tokens are measured; the longer ones take about {left}")
    return rows


def _after_document(question: Question, document: str, length: int, tokenizer: Any) -> Question:
    """Return a question after the end of a document, `length` tokens together or a few less."""
    document = document[-_CHARACTERS * length :]

    def asked(kept: int) -> Question:
        return replace(question, turns=[f"{document[len(document) - kept :]}\n\n{question.turns[0]}"])

    def tokens(kept: int) -> int:
        return len(prompt_tokens(asked(kept).messages(1), with_tools(tokenizer, question.tools)))

    alone, whole = tokens(0), tokens(len(document))
    if not alone < length <= whole:
        problem = f"Question {question.question_id} has {alone} tokens, and {whole} after the texts of all others."
        raise UserError(problem, "Give more questions, or shorter ones.")
    return asked(bisect_right(range(len(document)), length, key=tokens) - 1)


def _drafter_rows(units: Sequence[Unit], options: EvalOptions) -> list[dict[str, Any]]:
    """Return a sweep's figures of every drafter, and the plain loop's speed."""
    plain, rows = figures.method_figures(units, PLAIN, options.seed), []
    for name in dict.fromkeys(name for unit in units for name in unit.runs if name != PLAIN):
        measured = figures.method_figures(units, name, options.seed)
        shown = options.drafter if name == HEADS else name.removeprefix(OTHER)
        row = {"name": shown, **{f"plain_{key}": plain[key] for key in ("tokens_per_second", "ttft_ms")}}
        rows.append(row | {key: measured[key] for key in _SWEEP_FIGURES})
    return rows


def _conversations(target: FrozenModel, questions: Sequence[Question], units: list[Unit]) -> Iterator[list[Prompt]]:
    """Yield a batch's prompts, turn by turn; later turns contain the plain answers of the unit before."""
    messages = [question.messages(0) for question in questions]
    for turn in range(max(len(question.turns) for question in questions)):
        prompts, numbers = [], [number for number, question in enumerate(questions) if turn < len(question.turns)]
        for number in numbers:
            question = questions[number].turns[turn]
            messages[number].append({"role": "user", "content": question})
            name = str(questions[number].question_id) + (f"/{turn + 1}" if turn else "")
            tokens = prompt_tokens(messages[number], with_tools(target.tokenizer, questions[number].tools))
            prompts.append(Prompt(name, questions[number].category, tokens, question))
        yield prompts
        for number, answer in zip(numbers, units[-1].runs[PLAIN].tokens, strict=True):
            messages[number].append({"role": "assistant", "content": target.text_of(answer)})


def _judge(
    judge: Callable[[Texts, Texts, Texts], Judgement],
    units: Sequence[Unit],
    options: EvalOptions,
    names: Sequence[str],
    console: Console | None,
) -> dict[str, Judgement]:
    """Compare each method's greedy text with the plain loop's. Sampled texts are not compared, because methods may draw
    different random numbers."""
    if options.temperature != 0:
        return dict.fromkeys(names, Judgement())
    with console.status("comparing the words, in float32 where they differ") if console else nullcontext():
        judged = {}
        for name in names:
            within = units_with(units, name)
            prompts = [prompt.tokens for unit in within for prompt in unit.prompts]
            plain, other = ([tokens for unit in within for tokens in unit.runs[of].tokens] for of in (PLAIN, name))
            judged[name] = judge(prompts, plain, other)
        return judged


def _texts(tokenizer: Any, plain: Sequence[int], drafted: Sequence[int], position: int) -> dict[str, str]:
    """Return the common text before two answers diverge, and both continuations."""
    before = plain[max(0, position - _CONTEXT) : position]
    texts = {"before": token_texts(tokenizer, [], before)}
    for name, answer in (("plain", plain), ("drafted", drafted)):
        texts[name] = token_texts(tokenizer, before, answer[position : position + _CONTINUATION])
    return {name: "".join(pieces) for name, pieces in texts.items()}


def select_questions(
    target: FrozenModel, tokenizer: Any, questions: Sequence[Question], options: EvalOptions, console: Console | None
) -> list[Question]:
    """Select the questions and turns to ask; refuse settings that cannot be measured."""
    numbers = [(name, getattr(options, name)) for name in ("limit", "max_new_tokens", "batch_size", "long_context")]
    for name, value in [*numbers, *(("sweep_batch", size) for size in options.sweep_batch)]:
        if value is not None and value < (least := meaning(EvalOptions, name).minimum or 1):
            raise UserError(f"{name} is {value}.", f"Give a number of at least {least}.")
    check_options(options)
    selected = list(questions)[: options.limit]
    if not options.multi_turn:
        selected = [replace(question, turns=question.turns[:1]) for question in selected]
    if not selected:
        raise UserError("There are no questions.", "Give a question file with at least one line, or raise --limit.")
    if tokenizer is None or options.multi_turn:  # a target without a template can continue a text only once
        check_template(tokenizer)
    elif console is not None and not has_template(tokenizer):
        console.print(f"{target.name} has no chat template: it continues the text of each question.", style="dim")
    for question in selected:
        _check_fits(target, tokenizer, question, options)
    return selected


def _check_fits(target: FrozenModel, tokenizer: Any, question: Question, options: EvalOptions) -> None:
    """Refuse a question that exceeds the context with answers of maximum length."""
    if not question.turns:
        raise UserError(f"Question {question.question_id} has no turns.", "Give each question at least one turn.")
    messages = question.messages(0)
    for turn in question.turns:
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": ""}]
    length = len(prompt_tokens(messages[:-1], with_tools(tokenizer, question.tools)))
    new = len(question.turns) * options.max_new_tokens
    if length + new > target.max_length:
        raise UserError(
            f"Question {question.question_id} ({length} tokens) plus {new} new tokens exceeds {target.name}'s "
            f"context of {target.max_length}.",
            "Leave it out, or lower --max-new-tokens.",
        )
