"""Importing hidden states from vLLM: they match our own, and each bad file or server is refused with its reason."""

from __future__ import annotations

import json
import re
import shlex
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headstart.data.conversations.records import Conversation
from headstart.data.states import shards
from headstart.data.states.shards import StateKind, build_store
from headstart.data.states.store import StateStore
from headstart.data.states.vllm_files import Import, engine_layers, final_norm, import_from_servers, serve_command
from headstart.errors import UserError
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from headstart.servers import client
from tests.data.http_server import Reply, http_server
from tests.data.loading import some_conversations
from tests.spies import spy
from tests.tiny import KINDS, tiny_model

AUX_LAYERS = (2, 1, FINAL)
Change = Callable[[dict[str, torch.Tensor]], None]


def write(
    folder: Path,
    target: Target,
    tokens: Sequence[int],
    layers: Sequence[int] = (1, 2, 3),
    name: str = "",
    change: Change | None = None,
) -> Path:
    """Write the file of one request as vLLM 0.32 does: no metadata, an empty lock file, here in the target's dtype."""
    folder.mkdir(parents=True, exist_ok=True)
    (states,) = target.hidden_states([tokens], layers)
    tensors = {
        "hidden_states": torch.stack([states[layer] for layer in layers], dim=1).contiguous(),
        "token_ids": torch.tensor(list(tokens), dtype=torch.int64),
    }
    if change is not None:
        change(tensors)
    file = folder / f"cmpl-{name or len(list(folder.iterdir()))}-0-ba6c21d6.safetensors"
    save_file(tensors, file)
    file.with_name(file.name + ".lock").touch()
    return file


def importing(tmp_path: Path, target: Target, given: Sequence[Conversation]) -> Import:
    return Import(tmp_path / "shards", StateKind(target, AUX_LAYERS), given)


def stored(
    tmp_path: Path, target: Target, given: Sequence[Conversation], monkeypatch: pytest.MonkeyPatch
) -> tuple[StateStore, int]:
    """Return the store over the shards, and the number of conversations it had to compute."""
    with monkeypatch.context() as patched:
        rows = spy(patched, target, "hidden_states", lambda some, _: len(some))
        built = build_store(
            tmp_path / "store", given, target, AUX_LAYERS, budget_bytes=10**9, shards=tmp_path / "shards"
        )
    return built, sum(rows)


@pytest.mark.parametrize("shard_bytes", [1, 10**9], ids=["a shard each", "one shard"])
def test_imported_states_match_computed_ones(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    given = some_conversations(tiny_target, 5)
    for item in given:
        write(tmp_path / "files", tiny_target, item.tokens)
    monkeypatch.setattr(shards, "SHARD_BYTES", (shard_bytes, shard_bytes))
    work = importing(tmp_path, tiny_target, [*given, given[0]])
    seen: list[tuple[int, int]] = []
    work.read_folder(tmp_path / "files", lambda done, total: seen.append((done, total)))
    assert (work.imported, work.known, work.waiting, work.left_out) == (5, 0, [], {})
    assert seen == [(number, 5) for number in range(1, 6)]
    assert len(list((tmp_path / "shards").glob("shard-*"))) == (5 if shard_bytes == 1 else 1)
    built, computed = stored(tmp_path, tiny_target, given, monkeypatch)
    assert not computed
    for index, item in enumerate(given):
        sample = built.get(index)
        assert sample.tokens_T.tolist() == list(item.tokens)
        (expected,) = tiny_target.hidden_states([item.tokens], AUX_LAYERS)
        for layer in AUX_LAYERS:
            torch.testing.assert_close(sample.states[layer], expected[layer], rtol=1e-5, atol=1e-6)
    assert importing(tmp_path, tiny_target, given).known == 5, "a second import finds everything"


def test_only_missing_layers_are_taken(tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = some_conversations(tiny_target, 2)
    build_store(tmp_path / "one", given, tiny_target, (1,), budget_bytes=10**9, shards=tmp_path / "shards")
    (before,) = (tmp_path / "shards").glob("shard-*")
    for item in given:
        write(tmp_path / "files", tiny_target, item.tokens)
    work = importing(tmp_path, tiny_target, given)
    work.read_folder(tmp_path / "files")
    assert work.imported == 2
    (added,) = set((tmp_path / "shards").glob("shard-*")) - {before}
    assert added.stat().st_size < 2.5 * before.stat().st_size, "two layers, the first one had one"
    assert stored(tmp_path, tiny_target, given, monkeypatch)[1] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_final_norm_of_every_architecture(kind: str) -> None:
    target = Target(tiny_model(kind), None)
    states = target.hidden_states([[5, 6, 7, 8]], [target.num_layers, FINAL])[0]
    normed = final_norm(target)(states[target.num_layers][None])[0]
    torch.testing.assert_close(normed, states[FINAL])
    assert not torch.equal(states[target.num_layers], states[FINAL])


def test_serve_command_names_the_layers_before_the_norm(tiny_target: Target, tmp_path: Path) -> None:
    words = shlex.split(serve_command("user/model", tiny_target, (FINAL, 0, 2), tmp_path))
    settings = {name: json.loads(words[words.index(name) + 1]) for name in words if name.endswith("-config")}
    wanted = settings["--speculative-config"]["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert wanted == [0, 2, 3] == engine_layers((FINAL, 0, 2), tiny_target)
    assert settings["--kv-transfer-config"]["kv_connector_extra_config"] == {"shared_storage_path": str(tmp_path)}
    assert words[:3] == ["vllm", "serve", "user/model"]
    assert words[words.index("--dtype") + 1] == "float32"
    assert engine_layers((3, FINAL), tiny_target) == [3], "both come from the last layer"


# -- bad files ---------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (half, "its states are bfloat16 and those of the run float32: start vLLM with --dtype float32"),
        (nan, "it has states that are not finite"),
        (never_written, "it has states that were never written"),
        (other_names, "no hidden_states and token_ids"),
        (fewer, r"its states are \[\d+, 3, 64\] and not \[\d+, 3, 64\]"),
        (fewer_layers, r"and not \[\d+, 3, 64\] .*: vLLM was not started with the layers 1, 2, 3"),
        (other_ids, "its token ids are of no conversation that lacks states"),
        ("cut", "cut short or no safetensors file"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_bad_file_is_left_out_with_its_reason(tiny_target: Target, tmp_path: Path, change: Any, said: str) -> None:
    given = some_conversations(tiny_target, 3)
    for number, item in enumerate(given):
        file = write(
            tmp_path / "files",
            tiny_target,
            item.tokens,
            name=f"{number}",
            change=change if number == 1 and change != "cut" else None,
        )
        if number == 1 and change == "cut":
            file.write_bytes(file.read_bytes()[:-100])
    work = importing(tmp_path, tiny_target, given)
    work.read_folder(tmp_path / "files")
    assert (work.imported, len(work.waiting)) == (2, 1)
    ((reason, files),) = work.left_out.items()
    assert files == ["cmpl-1-0-ba6c21d6.safetensors"]
    assert re.search(said, reason), reason


@pytest.mark.parametrize(
    ("layers", "said"),
    [((0, 1, 2), "layer 2 holds layer 1: off by one"), ((1, 1, 3), "layer 2 holds layer 1: off by one")],
)
def test_wrong_layers_are_refused(tiny_target: Target, tmp_path: Path, layers: tuple[int, ...], said: str) -> None:
    given = some_conversations(tiny_target, 5)
    for item in given:
        write(tmp_path / "files", tiny_target, item.tokens, layers)
    with pytest.raises(UserError, match=f"{said}.*1, 2, 3"):
        importing(tmp_path, tiny_target, given).read_folder(tmp_path / "files")
    assert not list((tmp_path / "shards").glob("*"))


def test_states_of_another_model_are_refused(tiny_target: Target, tmp_path: Path) -> None:
    other = Target(tiny_model("llama", 1, tiny_target.vocab_size, 1024), tiny_target.tokenizer)
    given = some_conversations(tiny_target, 5)
    for item in given:
        write(tmp_path / "files", other, item.tokens)
    with pytest.raises(UserError, match="holds no state that tiny has on these tokens"):
        importing(tmp_path, tiny_target, given).read_folder(tmp_path / "files")


def test_folder_without_files_is_refused(tiny_target: Target, tmp_path: Path) -> None:
    work = importing(tmp_path, tiny_target, some_conversations(tiny_target, 5))
    with pytest.raises(UserError, match=r"nowhere holds no .safetensors files.*shared_storage_path"):
        work.read_folder(tmp_path / "nowhere")


# -- a server --------------------------------------------------------------------------------------------------------


@dataclass
class Fake:
    """A vLLM server that writes hidden states. Each completion request consumes one fault until none is left.

    Faults: a number is an HTTP status; `drop` closes the connection, `junk` replies without JSON, `none` writes no
    states, `short` echoes fewer tokens, `lost` and `unlocked` name a missing file, `cut` truncates the file, and a
    function changes its tensors.
    """

    target: Target
    folder: Path
    faults: list[Any] = field(default_factory=list)
    asked: list[list[int]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""

    def reply(self, path: str, _headers: object, body: dict[str, Any] | None) -> Reply | None:
        if body is None:
            return Reply(200, {"data": [{"id": "fake"}]})
        assert (path, body["model"], body["max_tokens"]) == ("/v1/completions", "fake", 1)
        with self.lock:
            fault = self.faults.pop(0) if self.faults else None
        if fault == "drop":
            return None
        if isinstance(fault, int):
            return Reply(fault, "no")
        return Reply(200, "junk" if fault == "junk" else self.completion(body["prompt"], fault))

    def completion(self, tokens: list[int], fault: Any) -> dict[str, Any]:
        with self.lock:
            number = len(self.asked)
            self.asked.append(tokens)
            change = fault if callable(fault) else None
            file = write(self.folder, self.target, tokens, name=f"{number}", change=change)
        if fault == "cut":
            file.write_bytes(file.read_bytes()[:-9])
        if fault in ("lost", "unlocked"):
            file.unlink()
        if fault == "unlocked":
            file.with_name(file.name + ".lock").unlink()
        params = None if fault == "none" else {"hidden_states_path": str(file)}
        choice = {"text": "", "token_ids": [1], "prompt_token_ids": tokens[:-1] if fault == "short" else tokens}
        return {"choices": [choice], "kv_transfer_params": params}


Serve = Callable[..., Fake]


@pytest.fixture
def serve(tiny_target: Target, tmp_path: Path) -> Iterator[Serve]:
    with ExitStack() as running:

        def start(*faults: Any) -> Fake:
            fake = Fake(tiny_target, tmp_path / "files" / str(next(numbers)), list(faults))
            fake.url = running.enter_context(http_server(fake.reply))
            return fake

        numbers = count()
        yield start


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_WAIT", 0.0)


@pytest.mark.parametrize("requests", [1, 3])
def test_each_conversation_is_requested_once(
    tiny_target: Target, tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch, requests: int
) -> None:
    given = some_conversations(tiny_target, 5)
    fakes = [serve(), serve()]
    work = importing(tmp_path, tiny_target, given)
    import_from_servers([f"{fakes[0].url}/v1", fakes[1].url], work, requests)
    assert (work.imported, work.waiting) == (5, [])
    assert sorted(fakes[0].asked + fakes[1].asked) == sorted(list(item.tokens) for item in given)
    assert fakes[0].asked and fakes[1].asked
    assert not list((tmp_path / "files").rglob("*.*")), "imported files are deleted"
    assert stored(tmp_path, tiny_target, given, monkeypatch)[1] == 0


def test_failing_server_is_retried(tiny_target: Target, tmp_path: Path, serve: Serve) -> None:
    given = some_conversations(tiny_target, 5)
    fake = serve("drop", 503, "junk", 429, "lost")
    work = importing(tmp_path, tiny_target, given)
    import_from_servers([fake.url], work, 1)
    assert work.imported == 5


def test_conversations_before_a_failure_are_kept(tiny_target: Target, tmp_path: Path, serve: Serve) -> None:
    given = some_conversations(tiny_target, 5)
    with pytest.raises(UserError, match="answered 404"):
        import_from_servers([serve(*[None] * 3, 404).url], importing(tmp_path, tiny_target, given), 1)
    again = importing(tmp_path, tiny_target, given)
    assert (again.known, len(again.waiting)) == (3, 2)


@pytest.mark.parametrize(
    ("fault", "reason"), [(400, "the server refuses its tokens"), (nan, "its states are not finite")]
)
def test_bad_text_is_skipped(tiny_target: Target, tmp_path: Path, serve: Serve, fault: Any, reason: str) -> None:
    """The longest is requested first, and may exceed the server's context."""
    work = importing(tmp_path, tiny_target, some_conversations(tiny_target, 5))
    longest = work.waiting[0]
    import_from_servers([serve(fault).url], work, 1)
    assert work.imported == 4 and work.waiting == [longest]
    assert work.left_out == {reason: [longest.id]}
    assert not list((tmp_path / "files").rglob("*.*"))


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ([500] * 10, r"did not answer: 500 no \(10 tries\).*goes on from there"),
        ([400] * 5, "answered 400: no"),
        (["none"], "writes no hidden states"),
        (["short"], "did not read the token ids that it was sent"),
        (["unlocked"], "there is no such file here.*both see"),
        (["cut"], "cut short"),
        ([other_ids], "of other token ids than were asked for"),
        ([fewer_layers], "not started with the layers 1, 2, 3"),
    ],
    ids=["500", "400", "none", "short", "unlocked", "cut", "other ids", "fewer layers"],
)
def test_faults_are_named(tiny_target: Target, tmp_path: Path, serve: Serve, faults: list[Any], said: str) -> None:
    fake = serve(*faults)
    with pytest.raises(UserError, match=said):
        import_from_servers([fake.url], importing(tmp_path, tiny_target, some_conversations(tiny_target, 5)), 1)
