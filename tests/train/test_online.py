"""States computed in the training loop: batches, states and heads match the store, and nothing is stored."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headstart.data.conversations.records import Conversation, read_conversations
from headstart.data.states.online import OnlineStates
from headstart.data.states.store import StateStore
from headstart.errors import UserError
from headstart.heads.base import make_config
from headstart.model.model import Target
from headstart.recipes.recipe import load_recipe, parse_recipe
from headstart.replay.patch import FINAL
from headstart.support.artifacts import references
from headstart.train import starting_heads, trainer
from headstart.train.checks import check_training
from headstart.train.trainer import train
from headstart.train.training_artifact import training_artifact
from tests.data.test_store import poison
from tests.forks import Forks
from tests.spies import spy
from tests.train.conftest import MakeRecipe, Train, Workplace, clean_environment, conversations, online_states
from tests.train.results import assert_same, metrics, weights
from tests.train.test_golden import HEADS

SUMS = {"rtol": 1e-5, "atol": 1e-5}
"""float32 rounding: batches of another length give matrix products of other shapes, which sum in another order."""


Online = list[OnlineStates]


@pytest.fixture
def online(tiny_target: Target, states: Path) -> Online:
    return online_states(states, tiny_target)


def test_online_states_match_the_stored_ones(train_store: StateStore, online: Online) -> None:
    computed = online[0]
    assert (len(computed), computed.lengths) == (len(train_store), train_store.lengths)
    assert computed.hidden_size == train_store.hidden_size
    assert computed.target_fingerprint == train_store.target_fingerprint
    assert torch.equal(computed.supervised_counts(400), train_store.supervised_counts(400))
    assert computed.fingerprint != train_store.fingerprint, "they differ by rounding"
    batch = [3, 0, 11, 7]
    for one, other in zip(computed.samples(batch), train_store.samples(batch), strict=True):
        assert torch.equal(one.tokens_T, other.tokens_T) and torch.equal(one.supervised_T, other.supervised_T)
        assert one.states.keys() == other.states.keys()
        for layer, state_TE in one.states.items():
            assert state_TE.dtype == other.states[layer].dtype
            torch.testing.assert_close(state_TE, other.states[layer], **SUMS)
    assert torch.equal(computed.get(3).tokens_T, train_store.get(3).tokens_T)


def test_not_finite_states_are_named_and_teach_nothing(
    tiny_target: Target, online: Online, run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(tiny_target, monkeypatch, conversations(24, 0, tiny_target.vocab_size)[7].tokens)
    with pytest.warns(UserWarning, match="Conversation 7 .* not finite") as caught:
        result = run(tmp_path, train_on=online[0], validate_on=online[1], epochs=2)
    assert sum("not finite" in str(warning.message) for warning in caught) == 1, "once"
    assert online[0].left_out == [7]
    assert all(weight.isfinite().all() for weight in weights(result.last_folder).values())


def test_conversations_are_not_kept(tiny_target: Target, states: Path) -> None:
    """As Python lists, a million of them would fill the memory of a rank."""
    alive: list[weakref.ref[Conversation]] = []

    def each() -> Iterator[Conversation]:
        for item in conversations(24, 0, tiny_target.vocab_size):
            alive.append(weakref.ref(item))
            yield item

    online = OnlineStates(states, each(), tiny_target, [FINAL])
    gc.collect()
    assert len(online) == 24 and not any(item() for item in alive)
    wanted = conversations(24, 0, tiny_target.vocab_size)
    for item, sample in zip(wanted, online.samples(range(24)), strict=True):
        assert sample.tokens_T.tolist() == list(item.tokens) and sample.supervised_T.tolist() == list(item.supervised)
    assert len(OnlineStates(states, [], tiny_target, [FINAL])) == 0


@pytest.mark.parametrize("name", HEADS)
def test_every_family_trains_online_as_from_the_store(
    name: str, run: Train, online: Online, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses within the tolerance of the golden runs: Adam's first steps turn a rounding error into a full step."""
    settings: dict[str, Any] = {"heads": HEADS[name], "steps": 4, "eval_every": 1, "lr": 1e-3}
    computing = {"train_on": online[0], "validate_on": online[1]}
    read = spy(monkeypatch, trainer, "read_batch", lambda _store, batch, *_: batch)
    run(tmp_path / "stored", prefetch=0, **settings)
    stored_batches, read[:] = list(read), []
    run(tmp_path / "online", prefetch=0, **computing, **settings)
    assert read == stored_batches, "the same batches in the same order"
    stored, computed = (metrics(tmp_path / name) for name in ("stored", "online"))
    assert [row["loss"] for row in computed][1:] == pytest.approx([row["loss"] for row in stored][1:], rel=1e-3)
    assert [row["predictions"] for row in computed] == [row["predictions"] for row in stored]


def test_collective_reads_are_outside_the_block_that_shares_errors(
    tiny_target: Target, online: Online, run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one rank gathers errors while another gathers batches."""
    sharing, read = [False], list[bool]()

    @contextmanager
    def shared() -> Iterator[None]:
        sharing[0] = True
        yield
        sharing[0] = False

    def gather(batches: list[Any], indices: Any) -> None:
        batches[0] = indices
        read.append(sharing[0])

    monkeypatch.setattr(tiny_target, "sharded", True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    for module in (trainer, starting_heads):
        monkeypatch.setattr(module, "raise_on_all_ranks", shared)
    run(tmp_path, train_on=online[0], validate_on=online[1], heads=HEADS["eagle3"], steps=1)
    assert read and not any(read)


def test_batch_takes_one_forward(tiny_target: Target, online: Online) -> None:
    with pytest.MonkeyPatch.context() as patch:
        read = spy(patch, Target, "hidden_states", lambda _target, rows, _layers: len(rows))
        list(online[0].supervised())
        online[0].supervised_counts(tiny_target.vocab_size)
        assert not read, "masks cost no forward"
        online[0].samples([1, 2, 3])
    assert read == [3]


def test_online_training_is_its_own_artifact(
    recipe: MakeRecipe, tiny_target: Target, train_store: StateStore, online: Online, tmp_path: Path
) -> None:
    config = make_config(recipe().heads, tiny_target)
    stored = training_artifact(tmp_path / "run", recipe(), config, train_store, train_store)
    computed = training_artifact(tmp_path / "run", recipe(), config, online[0], online[1])
    again = training_artifact(tmp_path / "run", recipe(), config, *online)
    assert stored.name != computed.name == again.name


def test_command_trains_online(workplace: Workplace, forks: Forks, tiny_target: Target, tmp_path: Path) -> None:
    file, run = workplace(steps=2)
    online = run.with_name("online")
    words = ["-m", "headstart.train", file, "--run-dir", online, "data.states=online"]
    done = forks.run(*words, env=clean_environment())
    assert done.returncode == 0, done.stderr
    files = [online / "data" / "conversations" / f"{split}.jsonl" for split in ("train", "validation")]
    stores = [OnlineStates(file, read_conversations(file), tiny_target, [FINAL]) for file in files]
    recipe = load_recipe(str(file), ["data.states=online"])
    assert_same(online / "train" / "last", train(recipe, tiny_target, *stores, tmp_path / "here").last_folder)
    assert not list((online / "data" / "states").iterdir()) and "states" not in references(online)


def test_sharded_target_needs_online_states(recipe: MakeRecipe) -> None:
    values = recipe(shard_target=True).model_dump(mode="json")
    with pytest.raises(UserError, match=r"train\.shard_target does not go with data\.states=stored"):
        check_training(parse_recipe(values))
    values["data"]["states"] = "online"
    check_training(parse_recipe(values))
    for section, key, value in (("target", "adapter", "x"), ("target", "quantization", "int8")):
        changed = {**values, section: {**values[section], key: value}}
        with pytest.raises(UserError, match=rf"does not go with {section}\.{key}"):
            check_training(parse_recipe(changed))
