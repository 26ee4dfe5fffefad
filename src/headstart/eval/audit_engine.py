"""Audit of a serving engine: checks that its greedy tokens are the target's and its acceptance is that of the heads.

The engine answers first and can stop before the target is loaded. The target then reads each answer once:

- tokens: each must be the target's top token after the same prefix, or within rounding of it (see
  `headstart.eval.divergence`);
- acceptance: the heads are replayed on the engine's answers with its number of drafts. The engine's counters may differ
  from this replay only by rounding;
- conditions: the heads are replayed with the usual errors of engines and files (see `headstart.eval.audit_conditions`).
  A replay that matches the counters, while the replay as trained does not, names the cause. Some errors cost little on
  short answers; they show only batch by batch;
- prompts: the engine must render chat messages to the token ids of the target's chat template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.errors import UserError
from headstart.eval.audit_conditions import Condition, Counts, Text, accepted_drafts, conditions, count_rounds
from headstart.eval.divergence import Difference, Judge
from headstart.eval.figures import LEAST_UNITS, Interval, Totals, interval
from headstart.eval.methods import Source
from headstart.heads.base import DraftHead
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from headstart.servers.completions import CompletionRequest
from headstart.servers.process import EngineAnswer, RunningEngine, drafts_per_round
from headstart.support.terminal import progress_bar, tracked

MATTERS = 0.02
"""Smallest relative change in tokens per round that is a finding; rounding alone changes less."""
ROUNDING = 0.05
"""Largest distance of a replay from the counters, per round, due to rounding; vLLM and llama.cpp had 0.02."""
_EXPLAINS = 0.5
"""A condition explains the counters if its distance is at most this fraction of the distance as trained."""
_CONTINUED = 32
"""Batch size for the continuation of answers."""
_FEW = 0.05
"""Fraction of wrong tokens above which the engine probably serves another target."""
_SHOWN = 8
"""Maximum tokens of a prompt to quote in a message."""


@dataclass(frozen=True)
class Batch:
    """Concurrent requests: indices of their prompts, the answers, the engine's counters, and its drafts per round.

    `fixed`: whether every round had this number, according to the counters.
    """

    prompts: Sequence[int]
    answers: Sequence[tuple[int, ...]]
    counts: Counts
    drafts: int
    fixed: bool


@dataclass(frozen=True)
class Recording:
    """Answers and counters of an engine.

    Attributes:
        engine: name and version.
        where: its command line or address.
        loads: batches by the number of concurrent requests.
        rendered: token ids of each question in the engine's chat template; None if it does not report them.
        longest: maximum answer length of engines that do not draft past it; None for others.
    """

    engine: str
    where: str
    prompts: Sequence[Sequence[int]]
    loads: Mapping[int, Sequence[Batch]]
    rendered: Sequence[list[int] | None]
    longest: int | None


# -- asking ------------------------------------------------------------------------------------------------------------


def record_engine(
    engine: RunningEngine,
    where: str,
    prompts: Sequence[Sequence[int]],
    questions: Sequence[str],
    max_new_tokens: int,
    requests: Sequence[int],
    console: Console | None = None,
) -> Recording:
    """Send the prompts at each number of concurrent requests, in at least `LEAST_UNITS` batches.

    `questions` are the prompts' texts for the engine's own chat template; empty to skip this check. Raises UserError if
    the engine does not answer, or served other requests meanwhile.
    """
    rendered = [engine.chat_prompt([{"role": "user", "content": question}]) for question in questions]
    past_end = engine.engine.dialect.drafts_past_end
    engine.answers([CompletionRequest(prompts[0], min(8, max_new_tokens))])  # warm-up
    counts = {load: max(LEAST_UNITS, -(-len(prompts) // load)) for load in requests}
    loads: dict[int, list[Batch]] = {load: [] for load in requests}
    with progress_bar(console, f"asking {engine.engine.name}", sum(counts.values())) as bar:
        for load, batches in counts.items():
            numbers = cycle(range(len(prompts)))
            for _ in range(batches):
                chosen = list(islice(numbers, load))
                before = engine.counters()
                answers = engine.answers([CompletionRequest(prompts[number], max_new_tokens) for number in chosen])
                counted = _reported(engine.counters() - before, answers)
                loads[load].append(_batch(engine, chosen, answers, counted))
                bar.advance(1)
    name = f"{engine.engine.name} {engine.version()}".strip()
    return Recording(name, where, prompts, loads, rendered, None if past_end else max_new_tokens)


def _reported(counted: Counts, answers: Sequence[EngineAnswer]) -> Counts:
    """Return the engine's counters; without a metrics page, the counts in its replies."""
    if counted["draft_tokens"]:
        return counted
    drafted, accepted = sum(answer.drafted for answer in answers), sum(answer.accepted for answer in answers)
    return Counts({"draft_tokens": drafted, "accepted_tokens": accepted})


def _batch(engine: RunningEngine, chosen: list[int], answers: Sequence[EngineAnswer], counted: Counts) -> Batch:
    decoded = sum(max(0, len(answer.tokens) - 1) for answer in answers)  # the prefill generates the first token
    accepted = counted["accepted_tokens"]
    by_position = Counts({key: counted[key] for key in counted if isinstance(key, int)})
    past_end = engine.engine.dialect.drafts_past_end
    rounds = counted["drafts"] if past_end else decoded - accepted  # others skip rounds without room for drafts
    drafts = drafts_per_round(counted, rounds)
    if rounds + accepted > decoded + drafts * len(answers) * past_end:
        raise UserError(
            f"{engine.engine.name} counted {rounds} rounds and {accepted} accepted drafts for {decoded} tokens.",
            "It answered other requests meanwhile: try again while it is idle.",
        )
    counts = by_position | Counts({"drafts": rounds, "accepted_tokens": accepted})
    fixed = not past_end or counted["draft_tokens"] == drafts * rounds
    return Batch(chosen, [answer.tokens for answer in answers], counts, drafts, fixed)


# -- judging -----------------------------------------------------------------------------------------------------------


def judge_engine(recording: Recording, source: Source, console: Console | None = None) -> dict[str, Any]:
    """Compare a recording with the target and heads of `source`.

    Returns the `engine` part of audit.json: name, where, tokens and acceptance (a row for each number of requests),
    conditions (replays with errors for one of the loads, the nearest to its counters first) and prompts. A row's
    `problem` is a finding; None if it is clean.
    """
    judging = _Judging(recording, source.target, source.heads)
    judging.read(console)
    acceptance = [judging.acceptance_row(load) for load in recording.loads]
    compared = [row for row in acceptance if row["change"]]
    tried: list[dict[str, Any]] = []
    for row in sorted(compared, key=lambda row: row["problem"] is None)[:1]:
        tried = judging.try_conditions(row["requests"], row["distance"], console)
        if row["problem"] or (tried and tried[0]["explains"]):
            row["problem"] = f"{row['problem'] or judging.moved(row)} {_explanation(tried)}"
    return {
        "name": recording.engine,
        "where": recording.where,
        "tokens": judging.token_rows(),
        "acceptance": acceptance,
        "conditions": tried,
        "prompts": judging.prompts_row(),
    }


def replay_acceptance(recording: Recording, target: Target, heads: DraftHead, load: int) -> dict[str, Any]:
    """Compare the tokens per round at one number of requests with a replay of these heads, as `judge_engine` does."""
    judging = _Judging(recording, target, heads)
    judging.read(None)
    return judging.acceptance_row(load)


class _Judging:
    """Comparison of a recording with target and heads, which read each text once."""

    def __init__(self, recording: Recording, target: Target, heads: DraftHead) -> None:
        self._recording, self._target, self._heads = recording, target, heads
        self._drafts = {load: max(batch.drafts for batch in batches) for load, batches in recording.loads.items()}
        batches = chain.from_iterable(recording.loads.values())
        self._texts = list(dict.fromkeys(text for batch in batches for text in self._texts_of(batch)))
        largest = max((token for text in self._texts for token in text.answer), default=0)
        if largest >= target.vocab_size:
            problem = f"{recording.engine} wrote token {largest}, and {target.name} has {target.vocab_size} tokens."
            raise UserError(problem, "Serve the target of the heads.")
        self._best: list[list[int]] = []  # the target's top token at each position of each text
        self._accepted: dict[Text, list[int]] = {}
        self._continued: dict[Text, Text] = {}

    def _texts_of(self, batch: Batch) -> list[Text]:
        pairs = zip(batch.prompts, batch.answers, strict=True)
        return [Text(tuple(self._recording.prompts[number]), answer) for number, answer in pairs if answer]

    @torch.inference_mode()
    def read(self, console: Console | None) -> None:
        """Continue each text by one draft length, and read it with target and heads."""
        loop, options = DecodeLoop(self._target), DecodeOptions(self._heads.draft_steps, ignore_end=True)
        for first in range(0, len(self._texts), _CONTINUED):
            part = self._texts[first : first + _CONTINUED]
            for text, written in zip(part, loop.generate([text.tokens for text in part], options), strict=True):
                self._continued[text] = replace(text, continuation=tuple(written.tokens))
        usual = Condition("as trained", "", self._heads)
        for text in tracked(self._texts, "reading its answers", len(self._texts), console):
            states = self._states(text, [usual])
            first = len(text.prompt) - 1
            logits_TV = self._target.lm_head(states[FINAL][first : first + len(text.answer)])
            self._best.append(logits_TV.argmax(-1).tolist())
            self._accepted[text] = accepted_drafts(usual, states, self._continued[text])

    def _states(self, text: Text, tried: Sequence[Condition]) -> dict[int, Tensor]:
        layers = {each.layers.get(layer, layer) for each in tried for layer in each.heads.aux_layers}
        return self._target.hidden_states([self._continued[text].tokens], sorted({*layers, FINAL}))[0]

    def _expected(self, batch: Batch, drafts: int, accepted: Mapping[Text, Sequence[int]]) -> Counts:
        """Count the rounds of a batch as the engine does, given the accepted drafts after each token."""
        counts, longest = Counts(), self._recording.longest
        for text in self._texts_of(batch):
            counts.update(count_rounds(accepted[text], text, drafts, longest))
        if longest is not None:
            counts["drafts"] = sum(len(answer) - 1 for answer in batch.answers if answer) - counts["accepted_tokens"]
        return counts

    # -- tokens ------------------------------------------------------------------------------------------------------

    def token_rows(self) -> list[dict[str, Any]]:
        judgement = Judge(self._target).judge_each(
            [text.prompt for text in self._texts], self._best, [text.answer for text in self._texts]
        )
        found: dict[Text, list[Difference]] = {text: [] for text in self._texts}
        for difference in judgement.differences:
            found[self._texts[difference.prompt]].append(difference)
        rows = []
        for load, batches in self._recording.loads.items():
            texts = [text for batch in batches for text in self._texts_of(batch)]
            differences = [(text, each) for text in texts for each in found[text]]
            wrong = [pair for pair in differences if not pair[1].explained]
            row: dict[str, Any] = {
                "requests": load,
                "texts": len(texts),
                "tokens": sum(len(text.answer) for text in texts),
                "different": len(differences),
                "unexplained": len(wrong),
                "margin_limit": judgement.margin_limit if differences else None,
                "largest_margin": max((each.margin or 0.0 for _, each in differences), default=None),
                "differences": [each.to_json() for _, each in differences],
                "problem": None,
            }
            if wrong:
                where = f"{self._name(load)}: {len(wrong)} of {row['tokens']} tokens are not the target's."
                row["problem"] = f"{where} {self._first_wrong(wrong, judgement.margin_limit)}"
            rows.append(row)
        return rows

    def _first_wrong(self, wrong: Sequence[tuple[Text, Difference]], limit: float | None) -> str:
        text, first = wrong[0]
        number = [tuple(prompt) for prompt in self._recording.prompts].index(text.prompt)
        own, theirs = (self._words([token]) for token in first.tokens if token is not None)
        few = len(wrong) < _FEW * sum(len(text.answer) for text in {text: None for text, _ in wrong})
        remedy = "Update the engine or report it." if few else f"Serve {self._target.name} in the dtype of its files."
        return (
            f"The first is token {first.position} of an answer to prompt {number}: {theirs} where the target has "
            f"{own}, {first.margin:.2f} below in float32 logits; rounding explains {limit:.2f}. {remedy}"
        )

    def _words(self, tokens: Sequence[int]) -> str:
        tokenizer = self._target.tokenizer
        return repr(tokenizer.decode(tokens)) if tokenizer is not None else str(list(tokens))

    def _name(self, load: int) -> str:
        return f"{self._recording.engine} at {load} request{'s' * (load > 1)}"

    # -- acceptance --------------------------------------------------------------------------------------------------

    def acceptance_row(self, load: int) -> dict[str, Any]:
        batches, drafts = self._recording.loads[load], self._drafts[load]
        engine, steps = [batch.counts for batch in batches], self._heads.draft_steps
        row: dict[str, Any] = {"requests": load, "drafts": drafts, "change": None, "distance": None, "problem": None}
        row |= {"expected_tokens_per_round": None, "expected_by_position": None, **_shown("", engine, drafts)}
        if not drafts:
            if not any(self._drafts.values()):
                row["problem"] = f"{self._name(load)} drafts nothing: see in its log whether it loads the heads."
            return row
        if drafts > steps:
            row["problem"] = (
                f"{self._name(load)} drafts {drafts} tokens; these heads draft at most {steps}. Lower its number."
            )
            return row
        if not all(batch.fixed for batch in batches):
            return row  # a schedule by load: the number of drafts in each round is unknown
        expected = [self._expected(batch, drafts, self._accepted) for batch in batches]
        change = _change(engine, expected)
        row |= {**_shown("expected_", expected, drafts), "change": change, "distance": _distance(engine, expected)}
        low, high = change["low"], change["high"]
        if low is not None and high is not None and (low > 0 or high < 0) and abs(change["mean"]) > MATTERS:
            row["problem"] = (
                f"{self._name(load)}: {row['tokens_per_round']:.2f} tokens per round, and "
                f"{row['expected_tokens_per_round']:.2f} expected on its own answers ({100 * change['mean']:+.1f} %, "
                f"{100 * low:+.1f} to {100 * high:+.1f} %){_by_position(row, 'expected_')}."
            )
            if low > 0:
                row["problem"] += " It drafts with other heads, or with n-grams too."
        return row

    def moved(self, row: Mapping[str, Any]) -> str:
        """Describe counters that agree with the replay only in total."""
        return (
            f"{self._name(row['requests'])}: {row['tokens_per_round']:.2f} tokens per round, as expected, but in "
            f"other rounds ({row['distance']:.2f} differences per round)."
        )

    @torch.inference_mode()
    def try_conditions(self, load: int, usual: float, console: Console | None) -> list[dict[str, Any]]:
        """Replay the heads under each condition on the texts of a load; return a row each, the nearest first.

        `usual` is the distance of the replay as trained.
        """
        batches, drafts = self._recording.loads[load], self._drafts[load]
        texts = list(dict.fromkeys(text for batch in batches for text in self._texts_of(batch)))
        tried = conditions(self._heads, self._target)
        accepted: list[dict[Text, list[int]]] = [{} for _ in tried]
        for text in tracked(texts, "replaying with errors", len(texts), console):
            states = self._states(text, tried)
            for each, counted in zip(tried, accepted, strict=True):
                counted[text] = accepted_drafts(each, states, self._continued[text])
        engine = [batch.counts for batch in batches]
        rows = []
        for each, counted in zip(tried, accepted, strict=True):
            expected = [self._expected(batch, drafts, counted) for batch in batches]
            distance = _distance(engine, expected)
            row = {"condition": each.name, "remedy": each.remedy, **_shown("", expected, drafts)}
            rows.append({**row, "distance": distance, "explains": usual > ROUNDING and distance <= _EXPLAINS * usual})
        return sorted(rows, key=lambda row: row["distance"])

    # -- prompts -----------------------------------------------------------------------------------------------------

    def prompts_row(self) -> dict[str, Any]:
        """Compare the engine's rendering of each question with the prompts, which our chat template rendered."""
        pairs = zip(self._recording.rendered, map(list, self._recording.prompts), strict=False)
        known = [(theirs, ours) for theirs, ours in pairs if theirs is not None]
        other = [pair for pair in known if pair[0] != pair[1]]
        row: dict[str, Any] = {"prompts": len(known), "different": len(other), "problem": None}
        if other:
            theirs, ours = other[0]
            same = next((at for at, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), -1)
            at = min(len(theirs), len(ours)) if same < 0 else same
            row["problem"] = (
                f"{self._recording.engine} renders {len(other)} of {len(known)} chat prompts differently: from token "
                f"{at} on {self._words(theirs[at : at + _SHOWN])}, where the target's template has "
                f"{self._words(ours[at : at + _SHOWN])}. Serve with the target's own chat template (--chat-template), "
                "and with the template variables of training (--default-chat-template-kwargs for vLLM, "
                "--chat-template-kwargs for llama-server)."
            )
        return row


def _change(engine: Sequence[Counts], expected: Sequence[Counts]) -> Interval:
    """Return the relative change from expected to counted tokens per round, over paired batches."""
    counted, replayed = (
        Totals([each["drafts"] + each["accepted_tokens"] for each in side], [each["drafts"] for each in side]).rates()
        for side in (engine, expected)
    )
    return interval(counted / replayed - 1)


def _distance(engine: Sequence[Counts], expected: Sequence[Counts]) -> float:
    """Sum the differences in rounds and in accepted drafts (by position if the engine counts so), per round.

    >>> _distance([Counts({"drafts": 4, "accepted_tokens": 2, 0: 2})], [Counts({"drafts": 3, 0: 2, 1: 1})])
    0.5
    """
    by_position = any(isinstance(key, int) for counts in engine for key in counts)
    total = 0
    for counted, replayed in zip(engine, expected, strict=True):
        keys = {key for key in (*counted, *replayed) if isinstance(key, int)} if by_position else {"accepted_tokens"}
        total += sum(abs(counted[key] - replayed[key]) for key in ("drafts", *keys))
    return total / max(1, sum(counted["drafts"] for counted in engine))


def _shown(prefix: str, counts: Sequence[Counts], drafts: int) -> dict[str, Any]:
    """Return rounds, tokens per round, and the fraction of rounds that accept each position, if counted."""
    rounds, accepted = (sum(each[key] for each in counts) for key in ("drafts", "accepted_tokens"))
    positions = range(drafts if any(isinstance(key, int) for each in counts for key in each) else 0)
    shares = [sum(each[position] for each in counts) / max(1, rounds) for position in positions]
    rate = 1 + accepted / rounds if rounds else 1.0
    return {f"{prefix}rounds": rounds, f"{prefix}tokens_per_round": rate, f"{prefix}by_position": shares}


def _by_position(row: Mapping[str, Any], other: str) -> str:
    if not row["by_position"]:
        return ""
    counted, replayed = (" / ".join(f"{share:.2f}" for share in row[f"{prefix}by_position"]) for prefix in ("", other))
    return f"; accepted by position {counted}, and {replayed} expected"


def _explanation(tried: Sequence[Mapping[str, Any]]) -> str:
    if not tried:
        return ""
    nearest = tried[0]
    shares = " / ".join(f"{share:.2f}" for share in nearest["by_position"])
    figures = f"{nearest['tokens_per_round']:.2f} tokens per round" + (f", by position {shares}" if shares else "")
    if nearest["explains"]:
        others = [row["condition"] for row in tried[1:] if row["explains"]]
        also = f" (next: {'; '.join(others)})" if others else ""
        return (
            f"An engine that {nearest['condition']} gives {figures}: that is the likely cause{also}. "
            f"{nearest['remedy']} Export the heads again (headstart export), and serve that folder."
        )
    return (
        f"None of {len(tried)} usual errors explains it. The nearest is an engine that {nearest['condition']}, with "
        f"{figures}. Compare with one concurrent request, and with a fresh export (headstart export)."
    )
