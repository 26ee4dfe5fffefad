"""Import of vLLM's extracted hidden states into shards, from files or from running servers.

vLLM (method `extract_hidden_states`, connector `ExampleHiddenStatesConnector`) writes a safetensors file per request:
`hidden_states` [T, L, E] and `token_ids` [T], without layer ids. Layers are ascending and numbered as here and in
transformers' hidden_states: 0 the embeddings, k the output of the k-th layer. Layer N is taken before the final norm,
which is applied here. The files prove none of this, so one conversation of each shard is compared with the target.

Shape suffixes: T tokens of one conversation, L layers in the file, E hidden size.
"""

from __future__ import annotations

import fcntl
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from headstart.data.conversations.records import Conversation, tokens_key
from headstart.data.states.identify import every_layer, identify
from headstart.data.states.shards import Capture, ShardIndex, StateKind, shard_size
from headstart.errors import UserError
from headstart.model.identity import dtype_name
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from headstart.servers.client import Endpoint, Pool, Refused, RetryableError
from headstart.servers.completions import CompletionRequest, served_by
from headstart.support.files import need_disk

_COMPARED = 128
"""Leading tokens to compare; in a causal model their states do not depend on the rest."""


class UnusableFile(Exception):
    """A file that cannot be imported, with the reason."""


class NotFinite(UnusableFile):
    """A file with non-finite states."""


def engine_layers(aux_layers: Iterable[int], target: Target) -> list[int]:
    """Return the layers to request from vLLM, ascending; see the module docstring."""
    return sorted({target.num_layers if layer == FINAL else layer for layer in aux_layers})


def serve_command(model: str, target: Target, aux_layers: Iterable[int], folder: Path) -> str:
    """Return the command of a vLLM server that writes this model's states at these layers into a folder."""
    layers = {"eagle_aux_hidden_state_layer_ids": engine_layers(aux_layers, target)}
    method = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
    storage = {"kv_connector_extra_config": {"shared_storage_path": str(folder)}}
    connector = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer", **storage}
    words = [
        *("vllm", "serve", model, "--dtype", target.dtype_name, "--no-enable-prefix-caching"),
        *("--speculative-config", json.dumps({**method, "draft_model_config": {"hf_config": layers}})),
        *("--kv-transfer-config", json.dumps(connector)),
    ]
    return shlex.join(words)


class Import:
    """An import of states into a folder's shards; skips states that the shards hold.

    Attributes:
        imported, known: number of conversations with imported states, and with states before.
        left_out: files, or ids of conversations, by reason.
    """

    def __init__(self, shards: Path, kind: StateKind, conversations: Sequence[Conversation]) -> None:
        self._folder, self._kind, self.target = shards, kind, kind.target
        self._engine_layers = engine_layers(kind.aux_layers, kind.target)
        unique = {tokens_key(item.tokens): item for item in conversations}
        missing = ShardIndex(shards, kind.owner).missing(unique, kind.aux_layers)
        self._missing = {key: (unique[key], layers) for layers, keys in missing.items() for key in keys}
        self._pending: dict[tuple[int, ...], list[tuple[Conversation, Mapping[int, Tensor]]]] = {}
        self._bytes = self.imported = 0
        self.known = len(unique) - len(self._missing)
        self.left_out: dict[str, list[str]] = {}
        needed = sum(
            replace(kind, aux_layers=layers).bytes(len(item.tokens)) for item, layers in self._missing.values()
        )
        need_disk(shards, needed, "Keeping hidden states")
        self._shard_bytes = shard_size(needed)

    @property
    def waiting(self) -> list[Conversation]:
        """Conversations without states, longest first."""
        return sorted((item for item, _ in self._missing.values()), key=lambda item: -len(item.tokens))

    def read_folder(self, folder: Path, advance: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Import the files of a folder without changing them."""
        files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
        if not files:
            raise UserError(
                f"{folder} holds no .safetensors files.",
                "Name the folder that vLLM writes to (shared_storage_path), or the address of the server.",
            )
        for number, file in enumerate(files, start=1):
            try:
                self.read(file)
            except UnusableFile as problem:
                self.left_out.setdefault(str(problem), []).append(file.name)
            advance(number, len(files))
        self.flush()

    def read(self, file: Path, expected: Sequence[int] | None = None) -> None:
        """Import a file with the states of the `expected` tokens (None: of any waiting conversation).

        Raises:
            UnusableFile: truncated, other tokens, layers or sizes, or non-finite or unwritten states.
        """
        tokens, states_TLE = self._tensors(file)
        if expected is not None and tokens != list(expected):
            raise UnusableFile("it is of other token ids than were asked for")
        if (key := tokens_key(tokens)) not in self._missing:
            raise UnusableFile("its token ids are of no conversation that lacks states")
        conversation, layers = self._missing[key]
        states = {layer: self._state(states_TLE, layer) for layer in layers}
        if not all(bool(state.isfinite().all()) for state in (states_TLE, *states.values())):
            raise NotFinite("it has states that are not finite")
        del self._missing[key]
        self._pending.setdefault(layers, []).append((conversation, states))
        self._bytes += sum(state.nbytes for state in states.values())
        if self._bytes >= self._shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write the pending states as shards; a UserError if they are not the target's at these layers."""
        pending, self._pending, self._bytes = self._pending, {}, 0
        for layers, states in pending.items():
            self._compare(*states[0])
            Capture(self._folder, replace(self._kind, aux_layers=layers)).store(states)
            self.imported += len(states)

    def _tensors(self, file: Path) -> tuple[list[int], Tensor]:
        try:
            tensors = load_file(file)
        except FileNotFoundError:
            raise UnusableFile("it is not there") from None
        except (SafetensorError, OSError):
            raise UnusableFile("it is cut short or no safetensors file") from None
        if not {"hidden_states", "token_ids"} <= tensors.keys():
            raise UnusableFile("it has no hidden_states and token_ids, so vLLM's connector did not write it")
        tokens, states_TLE = tensors["token_ids"].tolist(), tensors["hidden_states"]
        shape = (len(tokens), len(self._engine_layers), self.target.hidden_size)
        if tuple(states_TLE.shape) != shape:
            raise UnusableFile(
                f"its states are {list(states_TLE.shape)} and not {list(shape)} (tokens, layers, size): vLLM was not "
                f"started with the layers {', '.join(map(str, self._engine_layers))}, or serves another model"
            )
        if states_TLE.dtype != self.target.dtype:
            raise UnusableFile(
                f"its states are {dtype_name(states_TLE.dtype)} and those of the run {self.target.dtype_name}: start "
                f"vLLM with --dtype {self.target.dtype_name}"
            )
        if not states_TLE.any(dim=-1).all():
            raise UnusableFile("it has states that were never written")
        return tokens, states_TLE

    @torch.inference_mode()
    def _state(self, states_TLE: Tensor, layer: int) -> Tensor:
        engine_layer = self.target.num_layers if layer == FINAL else layer
        state_TE = states_TLE[:, self._engine_layers.index(engine_layer)].clone()
        if layer != FINAL:
            return state_TE
        normed_TE: Tensor = self._norm(state_TE[None].to(self.target.device))[0]
        return normed_TE.to(self.target.dtype).cpu()

    @cached_property
    def _norm(self) -> nn.Module:
        return final_norm(self.target)

    def _compare(self, conversation: Conversation, states: Mapping[int, Tensor]) -> None:
        fresh = self.target.hidden_states([conversation.tokens[:_COMPARED]], every_layer(self.target))[0]
        for layer, state_TE in states.items():
            _, difference = identify(layer, state_TE[:_COMPARED], fresh, self.target)
            if difference:
                raise UserError(
                    f"vLLM's states are not what they should be: {difference} (conversation {conversation.id!r}).",
                    f"Serve {self.target.name} with the layers {', '.join(map(str, self._engine_layers))}, as "
                    "headstart data import-states RECIPE shows.",
                )


def final_norm(target: Target) -> nn.Module:
    """Find the norm between the last layer's output and the final state; a UserError without one."""
    (states,) = target.hidden_states([[0, 1]], [target.num_layers, FINAL])
    module: nn.Module
    for module in target.decoder.children():
        if "norm" not in type(module).__name__.lower():
            continue
        with torch.inference_mode():
            normed_TE = module(states[target.num_layers][None])[0]
        if torch.equal(normed_TE, states[FINAL]):
            return module
    raise UserError(
        f"{target.name} has no norm of its own after the last layer.",
        "Compute the states here: headstart data build RECIPE.",
    )


# -- vLLM servers -------------------------------------------------------------------------------------------


_REQUESTS = 64
"""Default concurrent requests per address, which bounds the disk space of files waiting for import."""
_RESTART = "Start it as headstart data import-states RECIPE shows; then the same command goes on from there."


def import_from_servers(
    urls: Sequence[str],
    work: Import,
    requests: int | None,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Send waiting conversations to servers, import the files they write and delete them.

    `requests` bounds the concurrent requests over all servers. `advance` is called with (tokens done, total tokens).
    """
    waiting, done, refusals = work.waiting, 0, list[Refused]()
    total = sum(len(item.tokens) for item in waiting)

    def send(number: int, endpoint: Endpoint) -> Path:
        return _request_file(endpoint, work.target.spec, waiting[number].tokens)

    pool = Pool(urls, requests or _REQUESTS * len(urls), _RESTART)
    try:
        with closing(pool.run(len(waiting), send)) as files:
            for number, file in files:
                done += len(waiting[number].tokens)
                advance(done, total)
                if isinstance(file, Refused):
                    refusals.append(file)
                    work.left_out.setdefault("the server refuses its tokens", []).append(waiting[number].id)
                    continue
                try:
                    work.read(file, waiting[number].tokens)
                except NotFinite:
                    work.left_out.setdefault("its states are not finite", []).append(waiting[number].id)
                except UnusableFile as problem:
                    raise UserError(f"{file}, which vLLM wrote: {problem}.", _RESTART) from None
                for path in (file, _lock_of(file)):
                    with suppress(OSError):
                        path.unlink()
        if refusals and len(work.waiting) == len(waiting):
            raise refusals[0]
    finally:
        work.flush()  # also after a failure, since the files of imported states are deleted


def _request_file(endpoint: Endpoint, spec: str, tokens: Sequence[int]) -> Path:
    """Send token ids to a server; return the file with their states."""
    served = endpoint.cached(lambda endpoint: served_by(endpoint, spec))
    path, body = served.dialect.request(CompletionRequest(tokens, 1), served.model)
    page = endpoint.fetch(path, body)
    try:
        file = Path((page.get("kv_transfer_params") or {})["hidden_states_path"])
        read = served.dialect.read(page).prompt
    except (KeyError, IndexError, TypeError, AttributeError):
        raise UserError(f"{endpoint.url} answers, and writes no hidden states.", _RESTART) from None
    if read not in (None, list(tokens)):
        raise UserError(
            f"{endpoint.url} did not read the token ids that it was sent: {len(read or ())} for {len(tokens)}.",
            "It may add or cut tokens: give it a longer context.",
        )
    if _lock_of(file).is_file():  # held while vLLM writes
        with _lock_of(file).open("rb") as lock, suppress(OSError):  # no locks here: it is whole or refused below
            fcntl.flock(lock, fcntl.LOCK_SH)
    elif not file.is_file():
        raise UserError(
            f"{endpoint.url} reports the file {file}, and there is no such file here.",
            "shared_storage_path has to be a folder that the server and this machine both see under this name.",
        )
    if not file.is_file():
        raise RetryableError(f"it did not write {file}")
    return file


def _lock_of(file: Path) -> Path:
    return file.with_name(file.name + ".lock")
