"""The audit: clean on honest decoding, and each kind of broken decoding is found; what it writes and prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from headstart.api import Decoder
from headstart.decode import rules
from headstart.decode.budget import Costs
from headstart.decode.rules import RULES, Rule
from headstart.decode.verify import Accepted, Row, Streams, uniform
from headstart.drafters.heads import HeadDrafter
from headstart.errors import UserError
from headstart.eval.audit import _ROWS, RANDOM, WRONG, AuditOptions, costs_of_one_row, run_audit
from headstart.eval.audit_report import sentence, show_audit, write_audit
from headstart.support.rng import draw
from headstart.target.model import Target
from headstart.tree.proposal import Proposal
from headstart.tree.tree import TreeShape
from tests.decode.drafters import broken_trees
from tests.hub.helpers import TUNING, make_heads
from tests.tiny import tiny_model

PROMPTS = [[5, 9, 7, 3], [1, 2, 3, 4, 5, 6], [8, 8]]
QUICK = AuditOptions(
    drafters=("static", RANDOM, WRONG), batch_sizes=(1, 3), max_new_tokens=8, samples=1000, texts=1, depth=3,
    verifiers=("top_k", "greedy_draft"), temperatures=(0.0, 1.0),
)  # fmt: skip


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    model = tiny_model("llama", vocab_size=24)
    model.lm_head.weight.data *= 8  # a peaked distribution, as real models have
    target = Target(model, None, "tiny")
    return Decoder(target, make_heads(target), TreeShape.from_paths(TUNING["paths"]), TUNING)


@pytest.fixture(scope="module")
def results(decoder: Decoder) -> dict[str, Any]:
    options = AuditOptions(
        drafters=("static", RANDOM, WRONG, "ngram"),
        batch_sizes=(1, 3),
        max_new_tokens=10,
        samples=1000,
        texts=1,
        verifiers=tuple(RULES),
    )
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
    assert len(results["sampling"]) == len(RULES) * 2
    for row in results["sampling"]:
        assert row["samples"] == 1000
        assert row["samples"] <= row["rounds"] <= 2 * row["samples"], "two of three tokens, in one round or two"
        if row["lossless"]:
            assert row["cells"] > 2
            assert row["fits"] and row["impossible"] == 0
            assert row["level"] == pytest.approx(0.01 / 6)
            assert row["total_variation"] < 3 * row["expected_variation"]
    assert sum(row["drafts_accepted"] for row in results["sampling"]) > 0, "drafts were made"
    lossy = [row for row in results["sampling"] if not row["lossless"]]
    assert {row["verifier"] for row in lossy} == {"typical"}
    assert not all(row["fits"] for row in lossy), "the test tells a lossy rule"
    assert all(row["problem"] is None for row in lossy), "which nobody promised to be lossless"


def test_the_evidence_is_written_and_shown(results: dict[str, Any], tmp_path: Path) -> None:
    write_audit(results, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["audit.json", "audit.md"]
    assert json.loads((tmp_path / "out" / "audit.json").read_text())["clean"] is True
    text = (tmp_path / "out" / "audit.md").read_text()
    assert "**Clean: 240 greedy tokens and 8000 samples" in text
    assert "LOSSY (not counted)" in text
    assert "Bonferroni" in text
    console = Console(record=True, width=120)
    show_audit(results, console)
    shown = console.export_text()
    for words in ("greedy, static, batch 3", "greedy_draft, temperature 0.7", "LOSSY", "clean", "noise"):
        assert words in shown


def broken(monkeypatch: pytest.MonkeyPatch, accept_row: Any) -> None:
    """The default sampling rule, replaced."""
    monkeypatch.setitem(rules.RULES, "top_k", Rule("top_k", accept_row, RULES["top_k"].children))


def raw_bonus(row: Row, streams: Streams) -> Accepted:
    """Behind an accepted draft, the next token comes from a distribution without top-p."""
    honest = RULES["greedy_draft"].accept_row(row, streams)
    if len(honest.path) > 1:
        honest.tokens[-1] = draw(torch.softmax(row.p_target(honest.path[-1]), -1), streams.residual)
    return honest


def eager(row: Row, streams: Streams) -> Accepted:
    """Drafts are accepted twice as often as they should be."""
    path, node = [0], 0
    while row.children[node]:
        child = row.children[node][0]
        if uniform(streams.accept) >= 2 * float(row.p_target(node)[row.tokens[child]]):
            break
        path.append(node := child)
    token = draw(row.p_target(node), streams.residual)
    return Accepted(path, [*(row.tokens[one] for one in path[1:]), token])


def outside(row: Row, streams: Streams) -> Accepted:
    """Tokens that top-p leaves out are drawn now and then."""
    token = int(row.p_target(0).argmin()) if uniform(streams.accept) < 0.02 else draw(row.p_target(0), streams.residual)
    return Accepted([0], [token])


@pytest.mark.parametrize(
    ("rule", "words"), [(raw_bonus, "should never be drawn"), (eager, "do not fit"), (outside, "should never be drawn")]
)
def test_a_broken_rule_is_found(decoder: Decoder, monkeypatch: pytest.MonkeyPatch, rule: Any, words: str) -> None:
    broken(monkeypatch, rule)
    found = run_audit(decoder, PROMPTS, QUICK)
    assert not found["clean"]
    assert any(words in problem and "top_k" in problem for problem in found["problems"])
    assert not any("greedy_draft" in problem for problem in found["problems"]), "the honest rule stays clean"
    assert sentence(found).startswith("Not clean: ")
    assert all(row["problem"] is None for row in found["greedy"])


def test_a_wrong_greedy_token_is_found(decoder: Decoder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Target, "forward_tree", broken_trees(Target.forward_tree))
    found = run_audit(decoder, PROMPTS, AuditOptions(("static",), (1,), 6, temperatures=()))
    assert not found["clean"] and found["sampling"] == []
    (row,) = found["greedy"]
    assert row["different_prompts"] == 3
    assert row["differences"][0]["margin"] > 0
    assert "tokens differ" in found["problems"][0]
    write_audit(found, tmp_path)
    assert "**Not clean: 1 of 1 checks failed.**" in (tmp_path / "audit.md").read_text()


@pytest.mark.drafter_fails
def test_a_drafter_that_fails_proves_nothing(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> torch.Tensor:
        raise ValueError("no drafts today")

    monkeypatch.setattr(type(decoder.heads), "draft", fail)
    found = run_audit(decoder, PROMPTS, AuditOptions(("static",), (1,), 6, ("top_k",), (1.0,), samples=50, texts=1))
    assert [problem for problem in found["problems"] if "the drafter failed (ValueError: no drafts today)" in problem]
    assert len(found["problems"]) == 2


def test_a_batch_that_drafts_as_one_row_keeps_the_costs_of_drafting() -> None:
    alone = costs_of_one_row(Costs((1, 4), (10.0, 13.0), 5.0, 1.0, 4))
    assert alone == Costs((_ROWS, 4 * _ROWS), (10.0, 13.0), 5.0, 1.0, 4)
    assert costs_of_one_row(None) is None


def test_heads_without_a_tree_are_audited_with_a_small_one(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, propose = [], HeadDrafter.propose

    def noted(*arguments: Any) -> Proposal:
        sizes.append((tree := propose(*arguments)).size)
        return tree

    monkeypatch.setattr(HeadDrafter, "propose", noted)
    bare = Decoder(decoder.target, decoder.heads, TreeShape.chain(0), {**TUNING, "paths": ()})
    found = run_audit(bare, PROMPTS[:1], AuditOptions(("heads",), (1,), 6, temperatures=(0.0,)))
    assert found["clean"]
    assert sizes == [4] * found["greedy"][0]["rounds"] != [], "every round drafts two levels and a second child"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (AuditOptions(drafters=("ngrm",)), "ngram"),
        (AuditOptions(verifiers=("topk",)), "Did you mean 'top_k'"),
        (AuditOptions(temperatures=(-1.0,)), "temperature is -1"),
        (AuditOptions(top_p=2.0), "top_p is 2"),
        (AuditOptions(samples=0), "samples is 0"),
        (AuditOptions(depth=1), "depth is 1"),
        (AuditOptions(max_new_tokens=5000), "passes the 256 tokens"),
    ],
)
def test_bad_options_are_refused(decoder: Decoder, options: AuditOptions, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_audit(decoder, PROMPTS, options)
    with pytest.raises(UserError, match="single token"):
        run_audit(decoder, [[1]], AuditOptions())
    with pytest.raises(UserError, match="no prompt"):
        run_audit(decoder, [], AuditOptions())
