"""Audit of heads in a serving engine, started here or running at an address."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.console import Console

from headstart.data.prompts.chat import prompt_tokens, with_template_kwargs
from headstart.errors import UserError
from headstart.eval.audit import PROMPTS, SCHEMA_VERSION
from headstart.eval.audit_engine import MATTERS, ROUNDING, judge_engine, record_engine
from headstart.eval.environment import environment
from headstart.eval.methods import Source
from headstart.eval.options import AuditedEngine, AuditOptions
from headstart.heads.io import heads_folder
from headstart.hub.engines.facts import facts_of_heads
from headstart.hub.target_facts import TargetFacts
from headstart.pipeline.in_engine import exported_heads, read_tokenizer, served_with
from headstart.servers.process import RunningEngine, engine_at

_MOST_DRAFTS = 64
"""Tokens that the context must leave for drafts after an answer."""
_APPLY = {"max_new_tokens", "limit", "raw", "heads_name"}
"""Audit options that apply to engines."""


def audit_in_engine(
    folder: Path,
    questions: Sequence[str],
    options: AuditOptions,
    serving: AuditedEngine,
    target: str | None,
    load: Callable[[], Source],
    console: Console,
) -> dict[str, Any]:
    """Audit heads in the engine or at the address of `serving`.

    `load` loads target and heads after the engine has answered (and stopped, if it was started here). Returns the
    content of audit.json: schema_version, clean, problems (a sentence each), prompts, engine (see `judge_engine`),
    settings, environment.
    """
    defaults = AuditOptions()
    own = [item.name for item in fields(AuditOptions) if item.name not in _APPLY]
    if unused := [name for name in own if getattr(options, name) != getattr(defaults, name)]:
        raise UserError(f"--{unused[0].replace('_', '-')} is for headstart's own loop.", "Leave it out with --engine.")
    texts = list(questions or PROMPTS)[: options.limit]
    with _running(folder, serving, target, max(serving.engine_requests), console) as (engine, where, facts):
        prompts = _prompts(texts, options, facts)
        asked = () if options.raw else texts
        loads = serving.engine_requests
        recording = record_engine(engine, where, prompts, asked, options.max_new_tokens, loads, console)
    source = load()
    judged = judge_engine(recording, source, console)
    rows = [*judged["tokens"], *judged["acceptance"], judged["prompts"]]
    problems = [problem for row in rows if (problem := row["problem"])]
    return {
        "schema_version": SCHEMA_VERSION,
        "clean": not problems,
        "prompts": texts,
        "problems": problems,
        "engine": judged,
        "settings": {
            **{name: value for name, value in asdict(options).items() if name in _APPLY},
            "engine_requests": serving.engine_requests,
            "target": source.target.name,
            "target_fingerprint": source.target.identity().fingerprint,
            "heads_version": source.heads.version or None,
            "prompts": len(texts),
            "matters": MATTERS,
            "rounding": ROUNDING,
        },
        "environment": environment(source.target),
    }


@contextmanager
def _running(
    folder: Path, serving: AuditedEngine, target: str | None, requests: int, console: Console
) -> Iterator[tuple[RunningEngine, str, TargetFacts]]:
    """Yield the engine with heads, its command line or address, and facts of its target."""
    if serving.engine.startswith(("http://", "https://")):
        if serving != AuditedEngine(engine=serving.engine, engine_requests=serving.engine_requests):
            problem = "--engine-command, --engine-target and --engine-arguments start an engine, but this one runs."
            raise UserError(problem, "Leave them out with an address.")
        facts = facts_of_heads(heads_folder(folder), target)
        remedy = "Give the address of an engine that serves the target with these heads, such as http://localhost:8000."
        yield engine_at(serving.engine, facts.spec, remedy), serving.engine, facts
        return
    with console.status("exporting") as status, exported_heads(heads_folder(folder), target, serving, requests) as ours:
        tuned = ours.exported.drafts.get(ours.engine.name, {})
        one_number = {1: max(tuned.values())} if tuned else {}  # a schedule by load cannot be replayed
        drafting = served_with(ours.engine, ours.exported, one_number)
        status.update(f"starting {ours.engine.name}")
        with ours.start(drafting, "heads") as engine:
            status.stop()
            yield engine, shlex.join(engine.words), ours.exported.facts


def _prompts(texts: Sequence[str], options: AuditOptions, facts: TargetFacts) -> list[list[int]]:
    """Tokenize the questions as `Decoder.tokens` does, without the target's weights."""
    reads = read_tokenizer(facts)
    tokenizer = with_template_kwargs(reads.tokenizer, facts.chat_template_kwargs)
    render = (
        tokenizer.encode if options.raw else lambda text: prompt_tokens([{"role": "user", "content": text}], tokenizer)
    )
    prompts = [list(render(text)) for text in texts]
    longest, room = max(map(len, prompts)), reads.max_length - options.max_new_tokens - _MOST_DRAFTS
    if longest > room:
        raise UserError(
            f"A prompt has {longest} tokens, but the context of {reads.max_length} leaves {room} before the answer.",
            "Ask shorter questions, or lower --max-new-tokens.",
        )
    return prompts
