"""A vLLM server that extracts the hidden states of a tiny target, with faults, and an engine that a run starts."""

from __future__ import annotations

import json
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headstart.model.model import Target
from headstart.replay.patch import FINAL
from rehearsal.stand_in import prompt_logprobs
from tests.data.http_server import Reply, http_server

Change = Callable[[dict[str, torch.Tensor]], None]


@dataclass
class StatesServer:
    """A vLLM server that writes hidden states. Each completion request consumes one fault until none is left.

    Faults: a number is an HTTP status; `drop` closes the connection, `junk` replies without JSON, `none` writes no
    states, `short` echoes fewer tokens, `lost` and `unlocked` name a missing file, `cut` truncates the file, `silent`
    returns no log-probabilities, and a function changes the file's tensors.

    Attributes:
        changes: functions that change the tensors of every file of these token ids.
        asked: token ids of the requests that wrote a file, the first request of a client included.
    """

    target: Target
    folder: Path
    layers: Sequence[int] = (1, 2, 3)
    faults: list[Any] = field(default_factory=list)
    changes: dict[tuple[int, ...], Change] = field(default_factory=dict)
    asked: list[list[int]] = field(default_factory=list)
    url: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def reply(self, path: str, _headers: object, body: dict[str, Any] | None) -> Reply | None:
        if body is None:
            return Reply(200, {"data": [{"id": "fake"}]})
        assert (path, body["model"], body["max_tokens"]) == ("/v1/completions", "fake", 1)
        with self._lock:
            fault = self.faults.pop(0) if self.faults else None
            if fault == "drop":
                return None
            if isinstance(fault, int):
                return Reply(fault, "no")
            return Reply(200, "junk" if fault == "junk" else self._completion(body, fault))

    def _completion(self, body: dict[str, Any], fault: Any) -> dict[str, Any]:
        tokens = body["prompt"]
        folder, layers = Path(body.get("folder", self.folder)), body.get("layers", self.layers)
        change = fault if callable(fault) else self.changes.get(tuple(tokens))
        final_TE, file = self._write(folder, tokens, layers, change)
        self.asked.append(tokens)
        if fault == "cut":
            file.write_bytes(file.read_bytes()[:-9])
        if fault in ("lost", "unlocked"):
            file.unlink()
        if fault == "unlocked":
            file.with_name(file.name + ".lock").unlink()
        params = None if fault == "none" else {"hidden_states_path": str(file)}
        choice: dict[str, Any] = {"text": "", "token_ids": [1]}
        choice["prompt_token_ids"] = tokens[:-1] if fault == "short" else tokens
        if "prompt_logprobs" in body and fault != "silent":
            choice["prompt_logprobs"] = prompt_logprobs(self.target, tokens, final_TE)
        return {"choices": [choice], "kv_transfer_params": params}

    def _write(
        self, folder: Path, tokens: Sequence[int], layers: Sequence[int], change: Change | None
    ) -> tuple[torch.Tensor, Path]:
        """Write the file of a request as vLLM 0.32 does: no metadata, an empty lock file, in the target's dtype."""
        folder.mkdir(parents=True, exist_ok=True)
        (states,) = self.target.hidden_states([tokens], [*layers, FINAL])
        tensors = {
            "hidden_states": torch.stack([states[layer] for layer in layers], dim=1).contiguous(),
            "token_ids": torch.tensor(list(tokens), dtype=torch.int64),
        }
        if change is not None:
            change(tensors)
        file = folder / f"cmpl-{len(self.asked)}-0-ba6c21d6.safetensors"
        save_file(tensors, file)
        file.with_name(file.name + ".lock").touch()
        return states[FINAL], file


@contextmanager
def serving(*servers: StatesServer) -> Iterator[None]:
    with ExitStack() as running:
        for server in servers:
            server.url = running.enter_context(http_server(server.reply))
        yield


ENGINE = """
import importlib.util, json, os, signal, sys, urllib.request
from pathlib import Path
(repository, url), lives, (deaths, answers) = sys.argv[1:3], Path(sys.argv[3]), map(int, sys.argv[4:6])
sys.path.append(repository)  # last: its links are called train, data, eval ...
from rehearsal.engine_http import StandIn, serve
lives.open("a").write(f"{os.getpid()}\\n")
if len(lives.read_text().split()) > deaths:
    answers = 10**9
def given(name):
    return json.loads(sys.argv[sys.argv.index(name) + 1])
asks = {
    "model": "fake", "max_tokens": 1,
    "folder": given("--kv-transfer-config")["kv_connector_extra_config"]["shared_storage_path"],
    "layers": given("--speculative-config")["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"],
}
assert importlib.util.find_spec(given("--kv-transfer-config")["kv_connector_module_path"])
def answer(prompt, most, body):
    global answers
    answers -= 1
    if answers < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    more = {name: body[name] for name in ("prompt_logprobs",) if name in body}
    request = urllib.request.Request(url + "/v1/completions", json.dumps({**asks, "prompt": prompt, **more}).encode())
    page = json.load(urllib.request.urlopen(request))
    given = page["choices"][0].get("prompt_logprobs")
    return [0], {"kv_transfer_params": page["kv_transfer_params"], **({"prompt_logprobs": given} if given else {})}
serve(StandIn("vllm", answer), "127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1]))
"""
"""An engine that passes requests on to a `StatesServer`, and kills itself after a number of answers in its first lives.

It starts in a tenth of a second, since it imports no torch.
"""


def engine_command(folder: Path, server: StatesServer, deaths: int = 0, answers: int = 0) -> str:
    """Return data.server_command of that engine; its process ids are the lines of `lives` in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "engine.py").write_text(ENGINE)
    words = [sys.executable, str(folder / "engine.py"), str(Path(__file__).parents[1]), server.url]
    return shlex.join([*words, str(folder / "lives"), str(deaths), str(answers)])


def settings_of(command: str) -> list[str]:
    """Return overrides of a recipe whose hidden states an engine with this command streams to training."""
    return ["data.states=online", "data.states_server=vllm", f"data.server_command={json.dumps(command)}"]
