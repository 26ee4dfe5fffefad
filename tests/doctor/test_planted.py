"""A healthy run passes every check; each planted bug is named, and named first."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headstart.data.conversations.records import Conversation
from headstart.doctor import drafting_checks
from headstart.doctor.examination import CHECKS, examine
from headstart.doctor.subject import Subject, find_subject
from headstart.heads import base
from headstart.heads.base import DraftHead
from headstart.heads.medusa import MedusaHead
from headstart.heads.parts.residual import FinalSession
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from tests.doctor.conftest import planted, problems, read_again, rewrite, rewrite_states
from tests.tiny import CHATML, SPECIAL, tiny_model, tiny_tokenizer


def test_a_healthy_run_passes_every_check(healthy: Path) -> None:
    findings = list(examine(find_subject(str(healthy))))
    assert [finding.check for finding in findings] == [check.__name__ for _, check in CHECKS]
    assert all(finding.ok is True for finding in findings), findings
    assert all(finding.sentence and not finding.remedy for finding in findings)
    figures = findings[-1].figures
    assert 0 < figures["others"]["texts"] <= 8 and 0 < figures["own"]["texts"] <= 4
    assert all(row["tau"] >= 1 and 0 < row["entropy"] < 10 for row in (figures["own"], figures["others"]))
    assert f"{figures['others']['tau']:.2f} tokens per round" in findings[-1].sentence


# -- data ------------------------------------------------------------------------------------------------------------


def shifted(given: Sequence[bool], tokens: int) -> list[bool]:
    mask = list(given)
    return [False] * tokens + mask[:-tokens] if tokens > 0 else mask[-tokens:] + [False] * -tokens


@pytest.mark.parametrize(("tokens", "words"), [(1, "one token late"), (-1, "one token early"), (2, "2 tokens late")])
def test_a_shifted_mask(run: Path, tiny_target: Target, tokens: int, words: str) -> None:
    rewrite(run, tiny_target, lambda item: replace(item, supervised=shifted(item.supervised, tokens)))
    assert planted(run, "mask", words, "train.jsonl").figures["shift"] == tokens


def test_a_mask_shifted_in_the_store_alone(run: Path) -> None:
    for manifest in (run / "data" / "states").glob("*/manifest.json"):
        known = json.loads(manifest.read_text())
        known["supervised"] = [[[start + 1, stop + 1] for start, stop in spans] for spans in known["supervised"]]
        manifest.write_text(json.dumps(known))
    planted(run, "mask", "one token late", "data/states/train")


def test_supervised_padding_and_ends_that_are_not_learned(healthy: Path, run: Path, tiny_target: Target) -> None:
    def pad(item: Conversation) -> Conversation:
        return replace(item, tokens=[*item.tokens, 2, 0, 0], supervised=[*item.supervised, True, True, True])

    def cut(item: Conversation) -> Conversation:
        return replace(item, supervised=[*item.supervised[:-1], False])

    rewrite(run, tiny_target, cut)
    planted(run, "mask", "ends early")
    shutil.rmtree(run.parent)
    shutil.copytree(healthy.parent, run.parent, symlinks=True)
    rewrite(run, tiny_target, pad)
    planted(run, "mask", "after the end of the turn")


def test_nothing_supervised(run: Path, tiny_target: Target) -> None:
    file = run / "data" / "conversations" / "train.jsonl"
    rows = [{**json.loads(line), "supervised": []} for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    planted(run, "mask", "Nothing is supervised")


@pytest.mark.parametrize(
    "tokenizer",
    [
        tiny_tokenizer(CHATML.replace("'\n' + message['content']", "': ' + message['content']")),
        tiny_tokenizer(special=(SPECIAL[1], SPECIAL[0], SPECIAL[2])),
    ],
    ids=["template", "tokenizer"],
)
def test_another_template(run: Path, tiny_target: Target, tokenizer: Any) -> None:
    subject = find_subject(str(run), quick=True)
    subject.target = Target(tiny_target.model, tokenizer, "tiny")
    planted(subject, "template", "template or the tokenizer has changed", "differs from token")


def test_two_answers_in_one_conversation(tiny_target: Target, run: Path) -> None:
    """The second answer's place is known, too; the template's newline after the first is not learned."""
    from headstart.data.conversations.answers import _Ongoing
    from headstart.data.prompts.shapes import Prompt

    tokenizer = tiny_target.tokenizer

    def talk(item: Conversation) -> Conversation:
        turns = [{"role": "user", "content": "who are you"}, {"role": "user", "content": f"and {item.id}"}]
        row = _Ongoing(Prompt(turns, "", item.id), tokenizer)
        for words in ("the user is in", "a system of the"):
            row.add_turn(100, 16, 1000)
            row.add_answer([*tokenizer.encode(words), 2], tiny_target)
        return Conversation(item.id, row.tokens, row.supervised, row.messages, sampling={"temperature": 0.0})

    rewrite(run, tiny_target, talk)
    assert {finding.check for finding in problems(run)}.isdisjoint({"template", "mask"})
    rewrite(run, tiny_target, lambda item: replace(item, supervised=shifted(item.supervised, -1)))
    planted(run, "mask", "one token early")


# -- states ----------------------------------------------------------------------------------------------------------


States = dict[str, torch.Tensor]
WRONG_STATES: dict[str, tuple[tuple[int, ...], Callable[[States, Target, Path], States], str]] = {
    "off by one": (
        (1, 2), lambda states, *_: {"states.1": states["states.2"].clone()},
        "The store's layer 1 holds layer 2: off by one",
    ),
    "a norm too many": (
        (3,), lambda states, *_: {"states.3": states["states.-1"].clone()},
        "layer 3 holds the state after the final norm",
    ),
    "a norm is missing": (
        (), lambda states, target, run: {"states.-1": read_again(target, states, run, 3)},
        "FINAL holds the state before the final norm",
    ),
    "the token before": (
        (), lambda states, *_: {"states.-1": states["states.-1"].roll(1, 0)}, "FINAL is one token late"
    ),
}  # fmt: skip
"""Aux layers to store, a change to the states, and the report."""


@pytest.mark.parametrize("wrong", WRONG_STATES)
def test_wrong_states(wrong: str, run: Path, tiny_target: Target) -> None:
    aux_layers, change, words = WRONG_STATES[wrong]
    if aux_layers:
        rewrite(run, tiny_target, lambda item: item, *aux_layers)
        assert problems(run) == []
    rewrite_states(run, lambda states: {**states, **change(states, tiny_target, run)})
    planted(run, "states", words)


def test_states_of_products_in_8_bits(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded by some percent: wrong in float32, unless the run was written so."""

    def rounded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        states = ((name, part) for name, part in tensors.items() if "states" in name)
        return {**tensors, **{name: part * (1 + 0.03 * torch.randn(part.shape)) for name, part in states}}

    torch.manual_seed(0)
    rewrite_states(run, rounded)
    planted(run, "states", "holds no state")
    monkeypatch.setattr("headstart.doctor.subject.Subject.in_int8", True)
    assert not any(found.check == "states" for found in problems(run))


def test_states_of_another_model(run: Path, tiny_target: Target) -> None:
    other = Target(tiny_model("llama", seed=5, vocab_size=tiny_target.vocab_size), tiny_target.tokenizer, "other")
    rewrite(run, other, lambda item: item)
    planted(run, "states", "another model")


def test_answers_of_another_model(run: Path, tiny_target: Target) -> None:
    random = torch.Generator().manual_seed(0)

    def replace_answer(item: Conversation) -> Conversation:
        start = item.supervised.index(True)
        words = torch.randint(3, tiny_target.vocab_size, (len(item.tokens) - start,), generator=random).tolist()
        return replace(item, tokens=[*item.tokens[:start], *words])

    rewrite(run, tiny_target, replace_answer)
    planted(run, "teacher", "off-policy: they are marked as greedy")


def test_answers_that_were_given(run: Path, tiny_target: Target) -> None:
    from headstart.data.conversations.masks import encode

    def give(item: Conversation) -> Conversation:
        messages = [item.messages[0], {"role": "assistant", "content": f"the user of {item.id} is in a system to on"}]
        tokens, supervised = encode(messages, tiny_target.tokenizer)
        return Conversation(item.id, tokens, supervised, messages, sampling={"source": "given"})

    rewrite(run, tiny_target, give)
    assert "data.regenerate=true" in planted(run, "teacher", "they came with the prompts").remedy


@pytest.mark.parametrize("own", [True, False])
def test_answers_that_were_drawn(run: Path, tiny_target: Target, own: bool) -> None:
    """Draws of the target are told from draws of another model by their surprise alone."""
    from headstart.data.generation.generator import Continuation
    from headstart.data.generation.in_process import InProcess

    model = tiny_model("llama", vocab_size=tiny_target.vocab_size, max_length=1024)
    model.lm_head.weight.data *= 12  # a random model is undecided about everything
    target = Target(model, tiny_target.tokenizer, "tiny")
    writer = target if own else tiny_target

    def draw(item: Conversation) -> Conversation:
        prompt = list(item.tokens[: item.supervised.index(True)])
        (words,) = InProcess(writer).continue_rows([prompt], Continuation(60, [1.0], frozenset(), len(item.id)))
        mask = [False] * len(prompt) + [True] * len(words)
        return Conversation(item.id, prompt + words, mask, item.messages, sampling={"temperature": 1.0})

    rewrite(run, target, draw)
    subject = find_subject(str(run), quick=True)
    subject = Subject(target, subject.recipe, subject.run, None, quick=True)
    found = {finding.check: finding.sentence for finding in problems(subject)}
    assert ("teacher" in found) is not own
    assert own or "surprise it by" in found["teacher"]


# -- heads -----------------------------------------------------------------------------------------------------------


def rewrite_heads(run: Path, **tensors: torch.Tensor) -> None:
    file = run / "train" / "best" / "heads.safetensors"
    save_file({**load_file(file), **tensors}, file, {"format": "pt"})


def test_a_truncated_vocabulary(run: Path, tiny_target: Target) -> None:
    subject = find_subject(str(run))
    kept = set(subject.heads.draft_to_target_D.tolist())
    rare = [token for token in range(3, tiny_target.vocab_size) if token not in kept]
    rewrite_heads(run, draft_to_target_D=torch.tensor(sorted([2, *rare, *sorted(kept - {2})][: len(kept)])))
    assert planted(run, "vocabulary", "truncated").figures["coverage"] < 0.97


def with_nan(weight: torch.Tensor) -> torch.Tensor:
    return weight.index_fill(-1, torch.tensor([7]), torch.nan)


@pytest.mark.parametrize(
    ("tensor", "change", "words"),
    [
        ("draft_to_target_D", lambda ids_D: ids_D.flip(0), "does not name 200 different tokens"),
        ("draft_to_target_D", lambda ids_D: torch.cat([ids_D[:1], ids_D[:-1]]), "does not name 200 different tokens"),
        ("draft_to_target_D", lambda ids_D: ids_D + 250, "does not name 200 different tokens"),
        ("block_bias_KLE", with_nan, "holds numbers that are not finite"),
    ],
    ids=["unsorted", "repeated", "outside", "nan"],
)
def test_damaged_heads(run: Path, tensor: str, change: Any, words: str) -> None:
    rewrite_heads(run, **{tensor: change(find_subject(str(run)).heads.state_dict()[tensor])})
    planted(run, "vocabulary", f"{tensor} {words}")


def test_states_that_overflowed(run: Path) -> None:
    def overflow(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors["states.-1"][5] = torch.inf
        return tensors

    rewrite_states(run, overflow)
    planted(run, "states", "Stored states are not finite (the final state, conversation 0")


def test_heads_that_never_learned(run: Path, tiny_target: Target) -> None:
    heads = find_subject(str(run)).heads
    heads.requires_grad_(True).warm_start(tiny_target)
    rewrite_heads(run, **{name: weight.detach() for name, weight in heads.named_parameters() if "block" not in name})
    zero = {name: torch.zeros_like(weight) for name, weight in heads.named_parameters() if "block" in name}
    rewrite_heads(run, **zero)
    assert planted(run, "weights", "equal the warm start").stage == "training"


def test_heads_that_had_nothing_left_to_learn(run: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's next states are known from the start, as when it repeats itself."""
    test_heads_that_never_learned(run, tiny_target)
    steps = find_subject(str(run)).heads.draft_steps
    monkeypatch.setattr(drafting_checks, "decode", lambda *_: drafting_checks.Acceptance(steps, steps, 1.0))
    assert problems(run) == []
    found = {finding.check: finding for finding in examine(find_subject(str(run), quick=True))}
    assert f"{steps:.2f} of {steps} drafts per round are accepted without any training" in found["weights"].sentence


# -- decoding --------------------------------------------------------------------------------------------------------


class WrongHead(MedusaHead):
    """Drafts every token with the first head, and trains them all."""

    def depth_logits(self, session: FinalSession, root_B: Any, depths: range) -> Any:
        super().depth_logits(session, root_B, depths)
        return torch.cat([super(WrongHead, self).depth_logits(session, root_B, range(1)) for _ in depths], dim=1)


class Forgetful(MedusaHead):
    """Never learns what was accepted."""

    def commit(self, session: FinalSession, *arguments: Any) -> None:
        return None


class StateBefore(MedusaHead):
    """Opens with the state of the last token but one."""

    def prefill(self, prompts: Any, states: Any) -> FinalSession:
        return super().prefill([prompt[:-1] for prompt in prompts], states)


class ReadsNothing(MedusaHead):
    """Trains every position on the first state."""

    def unroll(self, batch: Any) -> Any:
        first_BTE = batch.states[FINAL][:, :1].expand_as(batch.states[FINAL])
        return super().unroll(replace(batch, states={FINAL: first_BTE}))


class Raises(MedusaHead):
    """Has a bug that stops it."""

    def depth_logits(self, *arguments: Any) -> Any:
        raise IndexError("no such level")


def examined_as(run: Path, cls: type[DraftHead]) -> dict[str, Any]:
    subject = find_subject(str(run), quick=True)
    subject.heads.__class__ = cls
    return {finding.check: finding for finding in examine(subject) if finding.ok is False}


@pytest.mark.parametrize(
    ("cls", "words", "figures"),
    [
        (WrongHead, "draft 2 of 2 differ from", {"step": 1, "observed_rounds": 0}),
        (Forgetful, "1 committed rounds, the logits of draft 1", {"step": 0, "observed_rounds": 1}),
        (StateBefore, "0 committed rounds, the logits of draft 1", {"step": 0, "observed_rounds": 0}),
        (ReadsNothing, "0 committed rounds, the logits of draft 1", {"step": 0, "observed_rounds": 0}),
    ],
)
def test_drafting_that_is_not_what_was_trained(run: Path, cls: Any, words: str, figures: dict[str, int]) -> None:
    found = examined_as(run, cls)
    assert next(iter(found)) == "equality"
    assert words in found["equality"].sentence
    assert figures.items() <= found["equality"].figures.items()
    assert cls is not Forgetful or "Only decoding is low" in found["acceptance"].sentence


@pytest.mark.drafter_fails
def test_a_family_that_breaks_is_a_finding(run: Path) -> None:
    found = examined_as(run, Raises)
    assert "IndexError: no such level" in found["equality"].sentence
    assert "Raises" not in found["equality"].remedy
    assert "test_planted.py" in found["equality"].figures["traceback"]
    assert "The drafter fails in decoding (IndexError: no such level)" in found["acceptance"].sentence


def test_training_itself_is_low(run: Path) -> None:
    weights = find_subject(str(run)).heads.state_dict()
    torch.manual_seed(0)
    rewrite_heads(run, lm_head_KDE=torch.randn_like(weights["lm_head_KDE"]))
    (only,) = problems(run)
    assert (only.check, only.stage) == ("acceptance", "training")
    assert "Training accuracy itself is low" in only.sentence
    assert "data.conversations" in only.remedy


def test_questions_that_the_data_do_not_cover(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"turns": ["what is a moon"]}\n')
    subject = find_subject(str(run), questions=file, quick=True)
    assert problems(subject) == []
    honest = drafting_checks.decode

    def worse(asked: Subject, prompts: Any) -> Any:
        real = honest(asked, prompts)
        return real._replace(accepted=0.0) if prompts == subject.question_prompts else real

    monkeypatch.setattr(drafting_checks, "decode", worse)
    (only,) = problems(subject)
    assert "too narrow for these questions" in only.sentence


def test_difference_of_drafts_with_candidates() -> None:
    """Two candidates that nearly tie may change places, also if both have no other."""
    none = -math.inf
    for one, other, difference in (
        ([none, 4.0, none, none], [none, none, 4.1, none], 0.0),
        ([none, 4.0, none, 3.0], [none, 4.0, 2.9, 2.0], 0.25),
        ([1.0, 4.0, none, none], [none, none, 4.1, 3.0], math.inf),
    ):
        assert drafting_checks._difference(torch.tensor(one), torch.tensor(other)) == difference


@pytest.mark.parametrize("cls", [WrongHead, Forgetful, ReadsNothing])
def test_a_family_is_examined_untrained(healthy: Path, cls: type[DraftHead], monkeypatch: pytest.MonkeyPatch) -> None:
    trained = find_subject(str(healthy), quick=True)
    subject = Subject(trained.target, trained.recipe, trained.run, None, quick=True)
    assert drafting_checks.equality(subject).ok is True
    monkeypatch.setitem(base._FAMILIES, "medusa", cls)
    finding = drafting_checks.equality(subject)
    assert finding.ok is False
    assert "differ from the training unroll" in finding.sentence
