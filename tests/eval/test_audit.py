"""The audit passes honest decoding and finds each kind of broken decoding; its files and console output."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from headstart.api import Decoder
from headstart.decode import verify
from headstart.decode.verify import SAMPLES_DRAFTS, SamplingVerifier, accept_or_draw
from headstart.drafters.heads import HeadDrafter
from headstart.errors import UserError
from headstart.eval.audit import RANDOM, WRONG, run_audit
from headstart.eval.audit_report import show_audit, verdict, write_audit
from headstart.eval.options import AuditOptions
from headstart.model.model import Target
from headstart.replay.cache import TreeCache
from headstart.tree.tree import Tree, TreeShape
from tests.decode.drafters import broken_trees
from tests.hub.helpers import TUNING, make_heads
from tests.spies import raising
from tests.tiny import tiny_model

PROMPTS = [[5, 9, 7, 3], [1, 2, 3, 4, 5, 6], [8, 8]]
QUICK = AuditOptions(
    drafters=("static", RANDOM, WRONG), batch_sizes=(1, 3), max_new_tokens=8, samples=1000, texts=1, depth=3,
    verifier=("top_k", "greedy_draft"), temperature=(0.0, 1.0),
)  # fmt: skip


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    model = tiny_model("llama", vocab_size=24)
    model.lm_head.weight.data *= 8  # peaked distributions, as in real models
    target = Target(model, None, "tiny")
    heads = make_heads(target)
    heads.version = "0a1b2c"
    return Decoder(target, heads, TreeShape.from_paths(TUNING["paths"]), TUNING)


@pytest.fixture(scope="module")
def results(decoder: Decoder) -> dict[str, Any]:
    quick: dict[str, Any] = {"batch_sizes": (1, 3), "max_new_tokens": 10, "samples": 1000, "texts": 1}
    options = AuditOptions(drafters=("static", RANDOM, WRONG, "ngram"), verifier=tuple(SAMPLES_DRAFTS), **quick)
    return run_audit(decoder, PROMPTS, options, Console(quiet=True))


def test_honest_decoding_is_clean(results: dict[str, Any]) -> None:
    json.dumps(results)
    assert results["clean"] and results["problems"] == []
    assert [(row["drafter"], row["batch_size"]) for row in results["greedy"]] == [
        (name, batch) for name in ("static", RANDOM, WRONG, "ngram") for batch in (1, 3)
    ]
    for row in results["greedy"]:
        assert (row["different_tokens"], row["differences"], row["tokens"]) == (0, [], 30)
    assert sum(row["drafts_accepted"] for row in results["greedy"] if row["drafter"] == WRONG) == 0
    assert len(results["sampling"]) == len(SAMPLES_DRAFTS) * 2
    for row in results["sampling"]:
        assert row["samples"] == 1000
        assert row["samples"] <= row["rounds"] <= 2 * row["samples"], "the last two of three tokens take 1 or 2 rounds"
        assert row["cells"] > 2
        assert row["problem"] is None and row["impossible"] == 0
        assert row["level"] == pytest.approx(0.01 / 4)
        assert row["again"] == {"texts": 16, "differ": 0}
        assert row["total_variation"] < 3 * row["expected_variation"]
    assert sum(row["drafts_accepted"] for row in results["sampling"]) > 0, "drafts were made"


def test_evidence_is_written_and_shown(results: dict[str, Any], tmp_path: Path) -> None:
    write_audit(results, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["audit.json", "audit.md"]
    assert json.loads((tmp_path / "out" / "audit.json").read_text())["clean"] is True
    text = (tmp_path / "out" / "audit.md").read_text()
    assert "**Clean: 240 greedy tokens and 4000 samples" in text
    largest = max(row["least_seen"] for row in results["sampling"])
    could = f"a drafter that gets one token in 10 wrong, and a sampling distribution off by {largest:.2f} or more"
    assert f"In 95 % of cases this finds {could}." in text, "from 30 tokens per drafter and batch size"
    assert "Bonferroni" in text
    console = Console(record=True, width=120)
    show_audit(results, console)
    shown = console.export_text()
    for words in ("greedy, static, batch 3", "greedy, n-gram, batch 1", "greedy_draft, temperature 0.7", "noise"):
        assert words in shown
    assert "Audit of heads (0a1b2c)" in shown and "| heads version | 0a1b2c |" in text, "which heads drafted"
    assert "| n-gram | 3 |" in text and "| heads name | heads |" in text and "ngram |" not in text


def test_certain_texts_prove_nothing_about_sampling(tmp_path: Path) -> None:
    model = tiny_model("llama", vocab_size=24)
    model.lm_head.weight.data *= 1000
    target = Target(model, None, "tiny")
    decoder = Decoder(target, make_heads(target), TreeShape.from_paths(TUNING["paths"]), TUNING)
    found = run_audit(decoder, PROMPTS, replace(QUICK, drafters=("static",), samples=40, verifier=("top_k",)))
    assert [row["least_seen"] for row in found["sampling"]] == [None]
    unseen = "In 1 of 1 sampling checks the text is nearly certain, so no deviation of frequencies would show."
    assert verdict(found).endswith(unseen)
    write_audit(found, tmp_path)
    assert "| not testable |" in (tmp_path / "audit.md").read_text()
    console = Console(record=True, width=140)
    show_audit(found, console)
    assert "detectable from –" in (shown := console.export_text()) and "not testable" in shown


def raw_bonus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break `top_k`: after an accepted draft, draw the next token without top-p."""
    accept, distributions = SamplingVerifier.accept, SamplingVerifier._distributions
    calls: list[int] = []

    def from_the_root(self: SamplingVerifier, *arguments: Any) -> Any:
        calls.clear()
        return accept(self, *arguments)

    def raw(self: SamplingVerifier, *arguments: Any) -> Tensor:
        calls.append(1)
        probs_MV = distributions(self, *arguments)
        return probs_MV if self.samples_drafts or len(calls) == 1 else torch.softmax(probs_MV, -1)

    monkeypatch.setattr(SamplingVerifier, "accept", from_the_root)
    monkeypatch.setattr(SamplingVerifier, "_distributions", raw)


def sharp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break `top_k`: draw likely tokens too often."""

    def sharper(p_target_MV: Tensor, *rest: Any) -> Tensor:
        return accept_or_draw(p_target_MV**2 if rest[2] is None else p_target_MV, *rest)

    monkeypatch.setattr(verify, "accept_or_draw", sharper)


def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break `top_k`: draw tokens outside top-p now and then."""

    def anything(p_target_MV: Tensor, accept_M: Tensor, *rest: Any) -> Tensor:
        now_and_then_M = (accept_M < 0.02) & torch.tensor(rest[1] is None)
        return torch.where(now_and_then_M, p_target_MV.argmin(-1), accept_or_draw(p_target_MV, accept_M, *rest))

    monkeypatch.setattr(verify, "accept_or_draw", anything)


@pytest.mark.parametrize(
    ("rule", "words"), [(raw_bonus, "should never be drawn"), (sharp, "do not fit"), (outside, "should never be drawn")]
)
def test_broken_rule_is_found(decoder: Decoder, monkeypatch: pytest.MonkeyPatch, rule: Any, words: str) -> None:
    rule(monkeypatch)
    found = run_audit(decoder, PROMPTS, QUICK)
    assert not found["clean"]
    assert any(words in problem and "top_k" in problem for problem in found["problems"])
    assert not any("greedy_draft" in problem for problem in found["problems"]), "the honest rule stays clean"
    assert verdict(found).startswith("Not clean: ")
    assert all(row["problem"] is None for row in found["greedy"])


def test_wrong_greedy_token_is_found(decoder: Decoder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Target, "forward_tree", broken_trees(Target.forward_tree))
    found = run_audit(decoder, PROMPTS, AuditOptions(("static",), (1,), 6, temperature=(0.0,)))
    assert not found["clean"] and found["sampling"] == []
    (row,) = found["greedy"]
    assert row["different_prompts"] == 3
    assert row["differences"][0]["margin"] > 0
    assert "tokens differ" in found["problems"][0]
    write_audit(found, tmp_path)
    assert "**Not clean: 1 of 1 checks failed.**" in (tmp_path / "audit.md").read_text()


def test_broken_batch_is_found_by_sampling_alone(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches over 8, rows lose their last accepted token; single rows and greedy decoding never show it."""
    commit = TreeCache.commit

    def forgetful(self: TreeCache, paths: Any, *on_device: Any) -> None:
        commit(self, paths, *on_device)
        if self.rows > 8 and max(map(len, paths)) > 1:
            self.lengths = [length - (len(path) > 1) for length, path in zip(self.lengths, paths, strict=True)]

    monkeypatch.setattr(TreeCache, "commit", forgetful)
    found = run_audit(decoder, PROMPTS, replace(QUICK, drafters=("static",), depth=5, samples=200))
    assert all(row["problem"] is None for row in found["greedy"]), "at most three rows"
    fault = "texts differ in a batch on the real cache"
    assert found["problems"] and all(fault in one for one in found["problems"])


@pytest.mark.drafter_fails
def test_failing_drafter_proves_nothing(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadDrafter, "propose", raising(ValueError("no drafts today")))
    found = run_audit(decoder, PROMPTS, AuditOptions(("static",), (1,), 6, ("top_k",), (1.0,), samples=50, texts=1))
    assert [problem for problem in found["problems"] if "the drafter failed (ValueError: no drafts today)" in problem]
    assert len(found["problems"]) == 2


def test_heads_without_a_tree_are_audited_with_a_small_one(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, propose = [], HeadDrafter.propose

    def noted(*arguments: Any) -> list[Tree]:
        (tree,) = propose(*arguments)
        sizes.append(tree.size)
        return [tree]

    monkeypatch.setattr(HeadDrafter, "propose", noted)
    bare = Decoder(decoder.target, decoder.heads, TreeShape.chain(0), {**TUNING, "paths": ()})
    found = run_audit(bare, PROMPTS[:1], AuditOptions(("heads",), (1,), 6, temperature=(0.0,)))
    assert found["clean"]
    assert sizes == [4] * found["greedy"][0]["rounds"] != [], "two levels and a second child"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (AuditOptions(drafters=("ngrm",)), "ngram"),
        (AuditOptions(verifier=("topk",)), "Did you mean 'top_k'"),
        (AuditOptions(temperature=(-1.0,)), "temperature is -1"),
        (AuditOptions(top_p=2.0), "top_p is 2"),
        (AuditOptions(samples=0), "samples is 0"),
        (AuditOptions(depth=1), "depth is 1"),
        (AuditOptions(max_new_tokens=5000), "context of 256"),
    ],
)
def test_bad_options_are_refused(decoder: Decoder, options: AuditOptions, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_audit(decoder, PROMPTS, options)
    with pytest.raises(UserError, match="single token"):
        run_audit(decoder, [[1]], AuditOptions())
    with pytest.raises(UserError, match="no prompt"):
        run_audit(decoder, [], AuditOptions())
