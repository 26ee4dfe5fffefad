"""Heads tuned elsewhere: costs are measured once, cached, and trees chosen again."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.api import Decoder
from headstart.decode.costs import Conditions, Costs, Measured
from headstart.decode.options import DecodeOptions
from headstart.heads import int8_weights
from headstart.heads.int8_weights import to_int8
from headstart.model.model import Target
from headstart.recipes.sections import TuneSection
from headstart.tree.tree import TreeShape
from headstart.tuning import local_costs
from headstart.tuning.acceptance import Text
from headstart.tuning.stopwatch import SHORT, Drafting, measure_costs
from headstart.tuning.tune import Tuning, tune
from tests.hub.helpers import TUNING, make_heads
from tests.spies import raising
from tests.tiny import tiny_model

ELSEWHERE = Conditions("another machine", "cpu", "bfloat16", 64, "2.11.0", prepacked=True)
FOUND = Measured(Costs((1, 4, 8), (1.0, 1.1, 1.2), 0.2, 0.05, 2, 0.01), packed=False)


@pytest.fixture
def costs_are_local() -> None:
    """Keep the real check of foreign costs, which the shared fixture disables."""


@pytest.fixture
def target() -> Target:
    return Target(tiny_model("llama", vocab_size=61))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Measured]:
    """Results that measuring returns, last first; the cache is in `tmp_path`."""
    results = [FOUND]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(local_costs, "measure_costs", lambda *_: results.pop())
    return results


def decoder(target: Target, tuning: dict[str, Any] | None = None) -> Decoder:
    torch.manual_seed(0)  # the same heads
    return Decoder(target, make_heads(target), TreeShape.from_paths(TUNING["paths"]), tuning or tuned(ELSEWHERE))


def tuned(conditions: Conditions) -> dict[str, Any]:
    settings = {"conditions": conditions.to_json() | {"context": 256, "rows": 1}}
    knots = {"log_probs": [[-5.0, 0.0]] * 2, "accepted": [[0.1, 0.9]] * 2}
    sampled = {f"sampled_{name}": values for name, values in knots.items()}
    return {**TUNING, "settings": settings, "calibration": {**knots, **sampled}}


def test_costs_are_measured_once(target: Target, measured: list[Measured], capsys: pytest.CaptureFixture[str]) -> None:
    first = decoder(target)
    answer = first.generate([5, 6, 7], max_new_tokens=8)
    assert first.costs == FOUND.costs
    said = capsys.readouterr().err
    assert said.startswith(
        "These heads were tuned with machine=another machine, dtype=bfloat16, threads=64, torch=2.11"
    )
    assert "; measuring the costs of drafting with machine=" in said and said.endswith(" s\n") and said.count("\n") == 1
    again = decoder(target)
    assert again.generate([5, 6, 7], max_new_tokens=8).tokens == answer.tokens
    assert again.costs == FOUND.costs and not measured, "from the cache"
    assert capsys.readouterr().err == ""


def test_each_setup_is_measured(target: Target, measured: list[Measured], monkeypatch: pytest.MonkeyPatch) -> None:
    measured += [replace(FOUND, packed=True), FOUND, FOUND]
    assert decoder(target).costs and len(measured) == 3
    other = decoder(target)
    with torch.no_grad():
        next(other.heads.parameters()).add_(1.0)
    assert other.costs and len(measured) == 2
    monkeypatch.setattr(torch, "get_num_threads", lambda: 33)
    assert other.costs and len(measured) == 1, "the same decoder notices the other number of threads"
    assert decoder(target.__class__(tiny_model("llama", 1, 61))).costs and not measured


def test_conditions_round_trip(target: Target) -> None:
    here = Conditions.of(target)
    assert Conditions.from_json(here.to_json()) == here != ELSEWHERE == Conditions.from_json(ELSEWHERE.to_json())
    assert Conditions.from_json(None) is None, "imported heads"


def test_no_needless_measurement(target: Target, measured: list[Measured], capsys: pytest.CaptureFixture[str]) -> None:
    at_home = decoder(target, tuned(Conditions.of(target)))
    at_home.generate([5, 6, 7], max_new_tokens=4)
    assert at_home.costs == Tuning.from_json(tuned(ELSEWHERE)).costs
    abroad = decoder(target)
    abroad.generate([5, 6, 7], max_new_tokens=4, drafter="none")
    abroad.generate([5, 6, 7], max_new_tokens=4, draft="off")
    assert len(measured) == 1 and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", '{"version": 1}', '"version": 0', *(f'"verify_ms": [{ms},' for ms in ('"a"', "NaN", "1.0, 1.0"))],
)
def test_damaged_cache_is_measured_again(target: Target, measured: list[Measured], tmp_path: Path, damage: str) -> None:
    measured.append(replace(FOUND, packed=True))
    assert decoder(target).costs
    (file,) = (tmp_path / "headstart" / "costs").glob("*.json")
    kept = json.dumps(json.loads(file.read_text()))
    assert json.loads(kept)["packed"]
    wrong = kept.replace('"verify_ms": [1.0,' if "ms" in damage else '"version": 1', damage)
    file.write_text(wrong if damage[:1] == '"' else damage)
    assert decoder(target).costs == FOUND.costs and not measured
    assert not json.loads(file.read_text())["packed"], "cached again"


def test_unwritable_cache_is_no_error(
    target: Target, measured: list[Measured], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert decoder(target).costs == FOUND.costs


def test_noisy_costs_are_not_kept(target: Target, measured: list[Measured], capsys: pytest.CaptureFixture[str]) -> None:
    measured.append(replace(FOUND, steady=False))
    assert decoder(target).costs and len(measured) == 1
    assert capsys.readouterr().err.endswith("measured again the next time\n")
    assert decoder(target).costs and not measured


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_deterministic_decoding_uses_the_stored_costs(
    target: Target, measured: list[Measured], capsys: pytest.CaptureFixture[str], temperature: float
) -> None:
    """In every process, even if measurements on a busy machine differ, and with other drafting in between."""
    measured[:] = [replace(FOUND, packed=True, steady=False), replace(FOUND, steady=False)]
    asked: dict[str, Any] = {"max_new_tokens": 24, "temperature": temperature, "seed": 3}
    answers, rounds = [], []
    for process in range(2):
        one = decoder(target)
        if process:
            one.generate([9, 8, 7], **asked)
            assert len(measured) == 1 and one.costs == FOUND.costs
            capsys.readouterr()
        for _ in range(2):
            answers.append(one.generate([5, 6, 7], deterministic=True, **asked).tokens)
            loop = one.loop(deterministic=True)
            assert loop.costs == Tuning.from_json(tuned(ELSEWHERE)).costs
            outputs = loop.generate([[5, 6, 7]], DecodeOptions(deterministic=True, **asked))
            rounds.append([(done.nodes, done.emitted) for done in outputs[0].rounds])
        words = capsys.readouterr().err
        assert words.startswith("These heads were tuned with machine=another machine") and words.count("\n") == 1
        assert words.endswith("; deterministic decoding takes their stored costs.\n")
    assert answers == answers[:1] * 4 and rounds == rounds[:1] * 4
    assert max(nodes for nodes, _ in rounds[0]) > 1, "it drafts"


def test_each_decoding_mode_has_its_own_weights(measured: list[Measured], monkeypatch: pytest.MonkeyPatch) -> None:
    """int8 weights are faster here, unlike where the heads were tuned."""
    monkeypatch.setattr(int8_weights, "_MIN", 1)
    measured[:] = [replace(FOUND, packed=True)]
    one = decoder(Target(tiny_model("llama", vocab_size=64)))
    for deterministic in (True, False, True):
        one.generate([5, 6, 7], max_new_tokens=4, deterministic=deterministic)
        packed = any(hasattr(weight, "int8") for weight in one.heads.parameters())
        assert packed is not deterministic


def test_failed_measurement_keeps_the_tuned_costs(
    target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(local_costs, "measure_costs", raising(RuntimeError("no clock")))
    assert decoder(target).costs == Tuning.from_json(tuned(ELSEWHERE)).costs
    assert capsys.readouterr().err.endswith("failed (RuntimeError).\n")


def test_imported_heads_warn_once(target: Target, measured: list[Measured], capsys: pytest.CaptureFixture[str]) -> None:
    settings = {name: value for name, value in TUNING["settings"].items() if name != "conditions"}
    imported = decoder(target, {**TUNING, "settings": settings})
    for _ in range(2):
        imported.generate([5, 6, 7], max_new_tokens=4)
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "never tuned (better: headstart tune HEADS, outside of a run with --conversations FILE.jsonl)" in sentence
    assert "measuring the costs of drafting with dtype=float32 ..." in sentence


# -- trees at other costs --------------------------------------------------------------------------------------------


@pytest.fixture
def tuning(target: Target) -> Tuning:
    """A tuning for costs at which four nodes cost as much as one, and eight twice as much."""
    acceptance = [[0.5, 0.2, 0.1], [0.5, 0.2, 0.1], [0.5, 0.2, 0.1]]
    curve = [[1, 1.0], [2, 1.4], [3, 1.55], [4, 1.7], [5, 1.4], [6, 1.3], [7, 1.2], [8, 1.1]]
    paths = ((0,), (0, 0), (1,))
    predicted = {"tokens_per_round": 1.87, "speedup": 1.7, "tokens_per_second": 170.0}
    return Tuning(paths, (1, 4, 8), (10.0, 10.0, 20.0), 1.0, acceptance, predicted, curve, chain=2)


@pytest.mark.parametrize(
    ("verify_ms", "draft_ms", "nodes", "chain"),
    [
        ((10.0, 10.0, 20.0), 1.0, 4, 3),
        ((10.0, 10.0, 10.0), 1.0, 8, 3),
        ((10.0, 40.0, 80.0), 1.0, 1, 0),
        ((10.0, 10.0, 20.0), 30.0, 1, 0),
    ],
)
def test_static_trees_and_chains_follow_the_costs(
    tuning: Tuning, verify_ms: tuple[float, ...], draft_ms: float, nodes: int, chain: int
) -> None:
    found = tuning.at_costs(Measured(Costs((1, 4, 8), verify_ms, draft_ms, 0.0, 3), packed=True))
    assert found.shape.size == nodes and found.chain == chain
    assert found.packed and found.costs == Costs((1, 4, 8), verify_ms, draft_ms, 0.0, 3)
    assert found.predicted["speedup"] == max(speedup for _, speedup in found.curve)
    if nodes == 4:
        assert found.paths == tuning.paths


def test_drafting_may_pay_here_only(tuning: Tuning, target: Target) -> None:
    nothing = replace(tuning, paths=(), curve=[[1, 1.0]], chain=0)
    assert nothing.drafter(make_heads(target)) is None
    found = nothing.at_costs(Measured(Costs((1, 8), (10.0, 10.0), 1.0, 0.0, 3), packed=False))
    assert found.shape.size > 4 and (0, 0) in found.paths


# -- measuring -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_8_bits", [1.0, 9.0])
def test_int8_weights_are_chosen_by_speed(target: Target, in_8_bits: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_weights, "_MIN", 1)
    heads = make_heads(Target(tiny_model("llama", vocab_size=64)))
    to_int8(heads)

    def is_packed() -> bool:
        return any(hasattr(weight, "int8") for weight in heads.parameters())

    timed = "headstart.tuning.stopwatch.draft_ms"
    monkeypatch.setattr(timed, lambda *_: Drafting(in_8_bits if is_packed() else 5.0, 1.0, 0.1))
    found = measure_costs(target, heads, [(0,)], replace(SHORT, node_counts=(1, 2), context=8, seconds=0.0))
    assert found.packed is (in_8_bits < 5.0) and found.costs.draft_ms == min(in_8_bits, 5.0)
    assert not is_packed(), "the drafter packs them again"


def test_tuning_records_its_conditions_and_fits_the_context() -> None:
    target = Target(tiny_model("llama", vocab_size=61, max_length=40))
    prob, heads = random.Random(1), make_heads(target)
    texts = [Text([prob.randrange(61) for _ in range(20)], [False] * 6 + [True] * 14) for _ in range(2)]
    made = tune(target, heads, texts, TuneSection(widths=(1, 4), max_nodes=6)).to_json()
    found = Tuning.from_json(json.loads(json.dumps(made)))
    assert found.conditions == Conditions.of(target)
    assert found.settings["conditions"]["rows"] == 1
    short = measure_costs(target, heads, found.ranked_paths, replace(SHORT, seconds=0.0))
    assert short.costs.node_counts == (1, 2, 4, 6, 8, 12, 16, 32) and short.costs.levels == heads.draft_steps
