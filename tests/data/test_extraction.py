"""Hidden states from vLLM servers: they match our own, and each bad file or server is refused with its reason."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.data.conversations.records import Conversation
from headstart.data.states import shards
from headstart.data.states.served import (
    ServedStates,
    StreamedStates,
    engine_layers,
    extraction_arguments,
    final_norm,
)
from headstart.data.states.shards import build_store
from headstart.data.states.store import StateStore
from headstart.errors import UserError
from headstart.model.frozen import FrozenModel
from headstart.model.model import Target
from headstart.model.teacher import TeacherModel, load_teacher, save_teacher
from headstart.replay.patch import FINAL
from headstart.servers import client
from tests.data.loading import some_conversations
from tests.states_server import StatesServer, serving
from tests.tiny import KINDS, tiny_model

AUX_LAYERS = (2, 1, FINAL)


@pytest.fixture(scope="module")
def teacher(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> TeacherModel:
    folder = save_teacher(tmp_path_factory.mktemp("teacher"), tiny_target)
    assert folder is not None
    return load_teacher(folder, torch.device("cpu"))


Serve = Callable[..., StatesServer]


@pytest.fixture
def serve(tiny_target: Target, tmp_path: Path) -> Iterator[Serve]:
    """Start a server; the first completion request of a client is the one that compares states."""
    with ExitStack() as running:

        def start(*faults: Any, **options: Any) -> StatesServer:
            options = {"target": tiny_target, **options}
            server = StatesServer(folder=tmp_path / "files" / str(next(numbers)), faults=list(faults), **options)
            running.enter_context(serving(server))
            return server

        numbers = count()
        yield start


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_WAIT", 0.0)


def connected(model: FrozenModel, *servers: StatesServer, requests: int = 1) -> ServedStates:
    return ServedStates([server.url for server in servers], model, AUX_LAYERS, requests, "Start it so: vllm serve")


def built(tmp_path: Path, target: Target, given: Sequence[Conversation], source: ServedStates) -> StateStore:
    return build_store(tmp_path / "store", given, target, AUX_LAYERS, budget_bytes=10**9, compute=source.states)


@pytest.mark.parametrize("shard_bytes", [1, 10**9], ids=["a shard each", "one shard"])
def test_states_of_servers_are_stored_as_computed_ones(
    tiny_target: Target,
    teacher: TeacherModel,
    tmp_path: Path,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    shard_bytes: int,
) -> None:
    given = some_conversations(tiny_target, 5)
    monkeypatch.setattr(shards, "SHARD_BYTES", (shard_bytes, shard_bytes))
    servers = [serve(), serve()]
    store = built(tmp_path, tiny_target, [*given, given[0]], connected(teacher, *servers, requests=3))
    assert len(list((tmp_path / "store").glob("shard-*"))) == (5 if shard_bytes == 1 else 1)
    for index, item in enumerate(given):
        sample = store.get(index)
        assert sample.tokens_T.tolist() == list(item.tokens)
        (expected,) = tiny_target.hidden_states([item.tokens], AUX_LAYERS)
        for layer in AUX_LAYERS:
            torch.testing.assert_close(sample.states[layer], expected[layer], rtol=1e-5, atol=1e-6)
    asked = sorted(servers[0].asked + servers[1].asked)
    assert len(asked) == 5 + sum(bool(server.asked) for server in servers), "one more for each server's comparison"
    assert {tuple(tokens) for tokens in asked} == {tuple(item.tokens) for item in given}
    assert not list((tmp_path / "files").rglob("*.*")), "read files are deleted"
    built(tmp_path, tiny_target, given, connected(teacher, servers[0]))
    assert sorted(servers[0].asked + servers[1].asked) == asked, "a second build finds everything"


def test_only_missing_layers_are_kept(tiny_target: Target, teacher: TeacherModel, tmp_path: Path, serve: Serve) -> None:
    given, folder = some_conversations(tiny_target, 2), tmp_path / "store"
    build_store(folder, given, tiny_target, (1,), budget_bytes=10**9)
    (before,) = folder.glob("shard-*")
    built(tmp_path, tiny_target, given, connected(teacher, serve()))
    (added,) = set(folder.glob("shard-*")) - {before}
    assert added.stat().st_size < 2.5 * before.stat().st_size, "two layers, the first one had one"


@pytest.mark.parametrize("kind", KINDS)
def test_final_norm_of_every_architecture(kind: str) -> None:
    target = Target(tiny_model(kind), None)
    states = target.hidden_states([[5, 6, 7, 8]], [target.num_layers, FINAL])[0]
    normed = final_norm(target)(states[target.num_layers][None])[0]
    torch.testing.assert_close(normed, states[FINAL])
    assert not torch.equal(states[target.num_layers], states[FINAL])


def test_arguments_name_the_layers_before_the_norm(tiny_target: Target, tmp_path: Path) -> None:
    words = extraction_arguments(tiny_target, (FINAL, 0, 2), tmp_path, {"kv_connector": "Other"})
    settings = {name: json.loads(words[words.index(name) + 1]) for name in words if name.endswith("-config")}
    wanted = settings["--speculative-config"]["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert wanted == [0, 2, 3] == engine_layers((FINAL, 0, 2), tiny_target)
    stored = settings["--kv-transfer-config"]
    assert stored["kv_connector_extra_config"] == {"shared_storage_path": str(tmp_path)}
    assert stored["kv_connector"] == "Other" and words[words.index("--dtype") + 1] == "float32"
    assert engine_layers((3, FINAL), tiny_target) == [3], "both come from the last layer"


# -- faults ------------------------------------------------------------------------------------------------------------


def half(tensors: dict[str, torch.Tensor]) -> None:
    tensors["hidden_states"] = tensors["hidden_states"].to(torch.bfloat16)


def nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["hidden_states"][2, 1, 7] = torch.nan


def never_written(tensors: dict[str, torch.Tensor]) -> None:
    tensors["hidden_states"][-1] = 0


def other_names(tensors: dict[str, torch.Tensor]) -> None:
    tensors["states"] = tensors.pop("hidden_states")


def fewer(tensors: dict[str, torch.Tensor]) -> None:
    tensors["hidden_states"] = tensors["hidden_states"][:-1].clone()


def fewer_layers(tensors: dict[str, torch.Tensor]) -> None:
    tensors["hidden_states"] = tensors["hidden_states"][:, 1:].clone()


def other_ids(tensors: dict[str, torch.Tensor]) -> None:
    tensors["token_ids"][1] += 1


def test_passing_faults_are_retried(tiny_target: Target, teacher: TeacherModel, tmp_path: Path, serve: Serve) -> None:
    given = some_conversations(tiny_target, 5)
    server = serve("drop", 503, "junk", 429, None, "lost", "cut", never_written)
    assert len(built(tmp_path, tiny_target, given, connected(teacher, server))) == 5
    assert not server.faults and not list((tmp_path / "files").rglob("*.*"))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(400, "the server refuses its tokens"), (nan, "not finite"), (fewer, r"vLLM wrote the states of \d+")],
)
def test_bad_conversation_is_left_out(
    tiny_target: Target, teacher: TeacherModel, tmp_path: Path, serve: Serve, fault: Any, reason: str
) -> None:
    given = some_conversations(tiny_target, 5)
    longest = max(range(5), key=lambda index: len(given[index].tokens))
    store = built(tmp_path, tiny_target, given, connected(teacher, serve(None, fault)))
    assert len(store) == 4 and store.left_out == {longest: given[longest].id}, "the longest is requested first"
    (said,) = store.reasons
    assert re.search(reason, said) and said in store.notice
    assert not list((tmp_path / "files").rglob("*.*"))


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ([500] * 10, r"did not answer: 500 no \(10 tries\).*vllm serve"),
        ([400] * 5, "answered 400: no"),
        ([None, *[404]], "answered 404: no"),
        (["none"], "writes no hidden states"),
        (["short"], "did not read the token ids that it was sent"),
        (["unlocked"], "there is no such file here.*both see"),
        (["silent"], "returns no prompt_logprobs"),
        ([*["cut"] * 10], r"wrote only a part of .*full \(10 tries\)"),
        ([None, other_ids], "the states of other token ids than it was sent"),
        (
            [None, fewer_layers],
            r"states of \[2, 64\] per token, not \[3, 64\].*the layers 1, 2, 3.*vllm serve",
        ),
        ([None, half], "states in bfloat16, but the run needs float32"),
        ([None, other_names], "files without hidden_states and token_ids"),
    ],
    ids=lambda value: None if isinstance(value, list) else value.split()[1],
)
def test_faults_are_named(
    tiny_target: Target, teacher: TeacherModel, tmp_path: Path, serve: Serve, faults: list[Any], said: str
) -> None:
    source = connected(teacher, serve(*faults))
    with pytest.raises(UserError, match=said):
        built(tmp_path, tiny_target, some_conversations(tiny_target, 5), source)
    assert not list((tmp_path / "store").glob("*.safetensors"))


@pytest.mark.parametrize("layers", [(1, 2, 2), (1, 2, 0)], ids=["one before the last", "the embeddings"])
def test_wrong_last_layer_is_refused_without_the_target(
    tiny_target: Target, teacher: TeacherModel, serve: Serve, layers: Sequence[int]
) -> None:
    source = connected(teacher, serve(layers=layers))
    with pytest.raises(UserError, match=r"another model or layer than tiny's: .* last layer differ.*by \d+%.*1, 2, 3"):
        source.states([item.tokens for item in some_conversations(tiny_target, 1)], AUX_LAYERS)


def test_another_model_is_refused_without_the_target(tiny_target: Target, teacher: TeacherModel, serve: Serve) -> None:
    other = Target(tiny_model("llama", 1, tiny_target.vocab_size, 1024), tiny_target.tokenizer)
    source = connected(teacher, serve(target=other))
    with pytest.raises(UserError, match=r"differ from the server's own by \d+%"):
        source.states([item.tokens for item in some_conversations(tiny_target, 1)], AUX_LAYERS)


@pytest.mark.parametrize(
    ("layers", "said"),
    [((0, 1, 2), "layer 1 holds the embeddings: off by one"), ((1, 1, 3), "layer 2 holds layer 1: off by one")],
)
def test_every_layer_is_compared_with_a_loaded_target(
    tiny_target: Target, serve: Serve, layers: Sequence[int], said: str
) -> None:
    source = connected(tiny_target, serve(layers=layers))
    with pytest.raises(UserError, match=said):
        source.states([item.tokens for item in some_conversations(tiny_target, 1)], AUX_LAYERS)


def test_streamed_sample_without_states_teaches_nothing(
    tiny_target: Target, teacher: TeacherModel, tmp_path: Path, serve: Serve
) -> None:
    given = some_conversations(tiny_target, 3)
    server = serve(changes={tuple(given[1].tokens): nan})
    streamed = StreamedStates(tmp_path, given, teacher, AUX_LAYERS)
    streamed.client = connected(teacher, server)
    with pytest.warns(UserWarning, match=r"Conversation 1 .*\(1 so far\): its hidden states are not finite") as caught:
        samples = streamed.samples([0, 1, 2]) + streamed.samples([1])
    assert sum("left out" in str(warning.message) for warning in caught) == 1 and streamed.left_out == [1]
    assert [bool(sample.supervised_T.any()) for sample in samples] == [True, False, True, False]
    assert not any(sample.states[layer].any() for sample in samples[1::2] for layer in AUX_LAYERS)
    (expected,) = tiny_target.hidden_states([given[2].tokens], AUX_LAYERS)
    for layer in AUX_LAYERS:
        torch.testing.assert_close(samples[2].states[layer], expected[layer], rtol=1e-5, atol=1e-6)
