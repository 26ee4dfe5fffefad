"""Hidden states captured while answers are decoded equal the states of one forward over the text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headstart.data.conversations.building import Splits, build_conversations
from headstart.data.states.shards import Capture, StateKind, build_store
from headstart.data.states.store import StateStore
from headstart.model.model import Target
from headstart.recipes.sections import DataSection
from headstart.replay.patch import FINAL
from headstart.support.files import write_jsonl
from tests.spies import spy

AUX_LAYERS = (0, 2, FINAL)
CLOSE = 1e-4
"""float32: tokens of an answer pass through the model one by one in decoding, all at once in the reference."""


def settings(tmp_path: Path, **more: object) -> DataSection:
    """One and two turns of many lengths; half of the answers at temperature 1."""
    prompts = [
        {"turns": [f"{'Tell me more about it. ' * (i % 7)}What is {i}?", f"And {i + 1}?"][: 1 + i % 2], "id": str(i)}
        for i in range(20)
    ]
    write_jsonl(tmp_path / "prompts.jsonl", prompts)
    values = {"conversations": 14, "heldout": 2, "validation": 3, "batch_size": 8, "max_new_tokens": 8}
    return DataSection.model_validate(
        {"prompts": str(tmp_path / "prompts.jsonl"), "sampled_fraction": 0.5, **values, **more}
    )


def written(target: Target, tmp_path: Path, section: DataSection, aux_layers: tuple[int, ...] = AUX_LAYERS) -> Splits:
    (tmp_path / "shards").mkdir(exist_ok=True)
    capture = Capture(tmp_path / "shards", StateKind(target, aux_layers))
    return build_conversations(target, section, tmp_path / "data", capture=capture)


def store(target: Target, tmp_path: Path, splits: Splits) -> tuple[StateStore, list[int]]:
    """Return the store of the training conversations, and the length of each text it had to compute."""
    computed: list[int] = []
    with pytest.MonkeyPatch.context() as patched:
        spy(patched, target, "hidden_states", lambda rows, _: computed.extend(map(len, rows)))
        built = build_store(
            tmp_path / "store", splits.train, target, AUX_LAYERS, budget_bytes=10**9, shards=tmp_path / "shards"
        )
    return built, computed


def test_states_kept_while_writing_match_reading(tiny_target: Target, tmp_path: Path) -> None:
    splits = written(tiny_target, tmp_path, settings(tmp_path))
    built, computed = store(tiny_target, tmp_path, splits)
    assert len(built) == 14 and not computed
    assert len({len(item.tokens) for item in splits.train}) > 5
    for index, item in enumerate(splits.train):
        sample = built.get(index)
        assert sample.tokens_T.tolist() == list(item.tokens)
        (read,) = tiny_target.hidden_states([item.tokens], AUX_LAYERS)
        for layer in AUX_LAYERS:
            torch.testing.assert_close(sample.states[layer], read[layer], atol=CLOSE, rtol=CLOSE)


def test_ended_answers_have_the_state_of_their_last_token(tmp_path: Path, tiny_target: Target) -> None:
    """The answers stop at end tokens, at different steps."""
    ends = frozenset(range(0, tiny_target.vocab_size, 5))
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(vars(tiny_target), "end_tokens", ends)
        splits = written(tiny_target, tmp_path, settings(tmp_path, max_new_tokens=24, sampled_fraction=1.0))
    built, computed = store(tiny_target, tmp_path, splits)
    assert not computed
    assert len({sum(item.supervised) for item in splits.train}) > 4
    assert {len(item.messages) for item in splits.train} == {2, 4}, "some have two turns"
    for index, item in enumerate(splits.train):
        (read,) = tiny_target.hidden_states([item.tokens], [FINAL])
        torch.testing.assert_close(built.get(index).states[FINAL], read[FINAL], atol=CLOSE, rtol=CLOSE)


def test_capturing_states_does_not_change_answers(tiny_target: Target, tmp_path: Path) -> None:
    section = settings(tmp_path)
    kept = written(tiny_target, tmp_path, section)
    plain = build_conversations(tiny_target, section, tmp_path / "plain")
    assert [item.tokens for item in kept.train] == [item.tokens for item in plain.train]


def test_states_over_memory_are_computed(tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.data.generation.in_process._STATES_SHARE", 0.0)
    splits = written(tiny_target, tmp_path, settings(tmp_path))
    assert not list((tmp_path / "shards").iterdir())
    assert len(store(tiny_target, tmp_path, splits)[1]) == 14


def test_layers_not_kept_are_computed(tiny_target: Target, tmp_path: Path) -> None:
    """Other heads read other layers of the same conversations."""
    splits = written(tiny_target, tmp_path, settings(tmp_path), (2, FINAL))
    built, computed = store(tiny_target, tmp_path, splits)
    assert len(computed) == 14 and set(built.aux_layers) == set(AUX_LAYERS)
