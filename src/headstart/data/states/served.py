"""Hidden states that vLLM servers extract, stored in shards or streamed to training.

vLLM (method `extract_hidden_states`, connector `ExampleHiddenStatesConnector`) writes a safetensors file per request:
`hidden_states` [T, L, E] and `token_ids` [T], without layer ids. Layers are ascending and numbered as here and in
transformers' hidden_states: 0 the embeddings, k the output of the k-th layer. Layer N is taken before the final norm,
which is applied here. A file names neither layers nor model, so `ServedStates` checks each server's first states.

Shape suffixes: T tokens of one conversation, L layers in the file, E hidden size, V vocabulary.
"""

from __future__ import annotations

import fcntl
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from headstart.data.states.identify import every_layer, identify
from headstart.data.states.online import OnlineStates
from headstart.data.states.store import NOT_FINITE, all_finite
from headstart.errors import UserError
from headstart.model.frozen import FrozenModel
from headstart.model.identity import dtype_name
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from headstart.servers.client import Endpoint, Pool, Refused, RetryableError
from headstart.servers.completions import CompletionRequest, OpenAI, ServedModel, served_by

REQUESTS = 64
"""Default concurrent requests per address; also bounds the number of unread files."""
_COMPARED = 128
"""Number of leading tokens to compare. In a causal model later tokens do not change their states."""
_EXACT, _COARSE = 0.01, 0.15
"""Maximum mean difference of log-probabilities, in float32 and in 16 bits, relative to their spread over a text. With
SmolLM2 in bfloat16 it is 0.01 for vLLM's states, and 0.9 for states of the second-to-last layer."""


def engine_layers(aux_layers: Iterable[int], model: FrozenModel) -> list[int]:
    """Return the layers to request from vLLM, ascending; see the module docstring."""
    return sorted({model.num_layers if layer == FINAL else layer for layer in aux_layers})


def extraction_arguments(
    model: FrozenModel, aux_layers: Iterable[int], folder: Path, connector: Mapping[str, str] | None = None
) -> list[str]:
    """Return vLLM arguments to write this model's states at these layers into a folder.

    `connector` replaces vLLM's own connector.
    """
    layers = {"eagle_aux_hidden_state_layer_ids": engine_layers(aux_layers, model)}
    method = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
    storage = {"kv_connector_extra_config": {"shared_storage_path": str(folder)}}
    written = {**(connector or {"kv_connector": "ExampleHiddenStatesConnector"}), "kv_role": "kv_producer", **storage}
    return [
        *("--dtype", model.dtype_name, "--no-enable-prefix-caching"),
        *("--speculative-config", json.dumps({**method, "draft_model_config": {"hf_config": layers}})),
        *("--kv-transfer-config", json.dumps(written)),
    ]


class ServedStates:
    """A client of vLLM servers that extract a model's states.

    Each server's first states are checked before use. If the target is loaded, every layer must match its own states.
    Otherwise the log-probabilities computed from the last layer must match the server's.

    Args:
        model: the loaded target, or its teacher.
        requests: concurrent requests over all servers.
        remedy: of errors about a missing or wrong server.
        recover: waits for the restart of an engine (see `Pool`); None for the user's own servers.
        check: polled while requests run, to abort them by raising; None for none.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: FrozenModel,
        aux_layers: Sequence[int],
        requests: int,
        remedy: str,
        recover: Callable[[str], bool] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._check = check or (lambda: None)
        self._model, self._layers, self._remedy = model, engine_layers(aux_layers, model), remedy
        norm = final_norm(model)
        # A teacher's norm runs on the CPU: on a GPU it would queue behind the training step.
        self._norm = norm if isinstance(model, Target) else deepcopy(norm).cpu()
        self._restarts, self._meeting = recover is not None, threading.Lock()
        self._pool = Pool(urls, requests, remedy, recover or (lambda _: False))

    def states(self, rows: Sequence[Sequence[int]], layers: Sequence[int]) -> list[dict[int, Tensor] | str]:
        """Return each row's states [T, E] by layer, or the reason why there are none. Thread-safe.

        Raises:
            UserError: no server answers, or one returns states of another model or layer.
        """
        ask = self._pool.run(len(rows), lambda number, endpoint: self._ask(endpoint, rows[number], layers), self._check)
        with closing(ask) as answers:
            found = dict(answers)
        refused = "the server refuses its tokens (a longer context may help: --max-model-len)"
        in_order = (found[row] for row in range(len(rows)))
        return [refused if isinstance(answer, Refused) else answer for answer in in_order]

    def _ask(self, endpoint: Endpoint, tokens: Sequence[int], layers: Sequence[int]) -> dict[int, Tensor] | str:
        with self._meeting:  # one check per server, even if many requests start at once
            served = endpoint.cached(lambda endpoint: self._meet(endpoint, tokens))
        _, states_TLE = self._request(endpoint, served, tokens)
        if len(states_TLE) != len(tokens):
            return f"it has {len(tokens)} tokens, but vLLM wrote the states of {len(states_TLE)}"
        states = {layer: self._state(states_TLE, layer) for layer in layers}
        return states if all_finite(states) else NOT_FINITE

    def _request(
        self, endpoint: Endpoint, served: ServedModel, tokens: Sequence[int], more: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], Tensor]:
        """Send token ids to a server; return its reply and the states [T, L, E], and delete their file."""
        path, body = served.dialect.request(CompletionRequest(tokens, 1), served.model)
        page = endpoint.fetch(path, {**body, **(more or {})})
        try:
            file = Path((page.get("kv_transfer_params") or {})["hidden_states_path"])
            read = served.dialect.read(page).prompt
        except (KeyError, IndexError, TypeError, AttributeError):
            raise UserError(f"{endpoint.url} answers, but writes no hidden states.", self._remedy) from None
        with _deleted(file):
            if read not in (None, list(tokens)):
                raise UserError(
                    f"{endpoint.url} did not read the token ids that it was sent: {len(read or ())} for {len(tokens)}.",
                    "It may add or truncate tokens. Start it with a longer context (--max-model-len).",
                )
            return page, self._read(endpoint, file, tokens)

    def _read(self, endpoint: Endpoint, file: Path, tokens: Sequence[int]) -> Tensor:
        lock = _lock_of(file)
        if lock.is_file():  # held while vLLM writes
            with suppress(OSError), lock.open("rb") as held:  # without locks, an incomplete file is refused below
                fcntl.flock(held, fcntl.LOCK_SH)
        elif not file.is_file() and not self._restarts:
            raise UserError(
                f"{endpoint.url} reports the file {file}, but there is no such file here.",
                "shared_storage_path must be a folder that the server and this machine both see under the same path.",
            )
        try:
            tensors = load_file(file)
        except FileNotFoundError:
            raise RetryableError(f"it did not write {file}; check whether the disk is full") from None
        except (SafetensorError, OSError):
            raise RetryableError(f"it wrote only a part of {file}; check whether the disk is full") from None
        if not {"hidden_states", "token_ids"} <= tensors.keys():
            raise self._wrong(endpoint, "files without hidden_states and token_ids")
        states_TLE, written = tensors["hidden_states"], tensors["token_ids"].tolist()
        expected = len(self._layers), self._model.hidden_size
        if written != list(tokens):
            raise self._wrong(endpoint, "the states of other token ids than it was sent")
        if states_TLE.ndim != 3 or tuple(states_TLE.shape[1:]) != expected:
            raise self._wrong(
                endpoint,
                f"states of {list(states_TLE.shape[1:])} per token, not {list(expected)} (layers, hidden size)",
            )
        if states_TLE.dtype != self._model.dtype:
            raise self._wrong(
                endpoint, f"states in {dtype_name(states_TLE.dtype)}, but the run needs {self._model.dtype_name}"
            )
        if not states_TLE.any(dim=-1).all():
            raise RetryableError(f"vLLM left some states of {file} unwritten")
        return states_TLE

    @torch.no_grad()  # not inference mode: heads train on these
    def _state(self, states_TLE: Tensor, layer: int) -> Tensor:
        engine_layer = self._model.num_layers if layer == FINAL else layer
        state_TE = states_TLE[:, self._layers.index(engine_layer)].clone()
        if layer != FINAL:
            return state_TE
        where = next(self._norm.parameters(), state_TE).device
        normed_TE: Tensor = self._norm(state_TE[None].to(where))[0]
        return normed_TE.to(self._model.dtype).cpu()

    # -- the check of a server ------------------------------------------------------------------------------------

    def _meet(self, endpoint: Endpoint, tokens: Sequence[int]) -> ServedModel:
        """Find the target among the server's models; a UserError if its states of a text are not the target's."""
        served = served_by(endpoint, self._model.spec)
        if not isinstance(served.dialect, OpenAI):
            raise UserError(f"{endpoint.url} is not vLLM. Only vLLM extracts hidden states.", self._remedy)
        text = tokens[:_COMPARED]
        try:
            page, states_TLE = self._request(endpoint, served, text, {"prompt_logprobs": 1})
        except Refused as refusal:  # the server's fault, not the text's
            raise UserError(refusal.problem, self._remedy) from None
        if isinstance(self._model, Target):
            fresh = self._model.hidden_states([text], every_layer(self._model))[0]
            layers = [*(layer for layer in self._layers if layer != self._model.num_layers), FINAL]
            compared = (identify(layer, self._state(states_TLE, layer), fresh, self._model) for layer in layers)
            fault = next((difference for _, difference in compared if difference), "")
        else:
            fault = self._differs(endpoint, page, text, self._state(states_TLE, FINAL))
        if fault:
            raise self._wrong(endpoint, f"states of another model or layer than {self._model.name}'s: {fault}")
        return served

    @torch.no_grad()
    def _differs(self, endpoint: Endpoint, page: dict[str, Any], text: Sequence[int], final_TE: Tensor) -> str:
        """Compare a text's log-probabilities, computed from its final states, with the server's; "" if they match."""
        if len(text) < 2 or not final_TE.isfinite().all():
            return ""
        try:
            given = page["choices"][0]["prompt_logprobs"][1:]
            pairs = zip(text[1:], given, strict=True)
            theirs_T = torch.tensor([place[str(token)]["logprob"] for token, place in pairs])
        except (KeyError, IndexError, TypeError, ValueError):
            problem = f"{endpoint.url} returns no prompt_logprobs to compare its states with."
            raise UserError(problem, self._remedy) from None
        logits_TV = self._model.lm_head(final_TE[:-1].to(self._model.device)).float()
        next_T = torch.tensor(text[1:], device=logits_TV.device)
        ours_T = logits_TV.log_softmax(-1).gather(1, next_T[:, None])[:, 0].cpu()
        spread = (theirs_T - theirs_T.mean()).abs().mean().clamp_min(1e-6)
        off = float((ours_T - theirs_T).abs().mean() / spread)
        if off <= (_EXACT if final_TE.dtype == torch.float32 else _COARSE):
            return ""
        return f"log-probabilities computed from its last layer differ from the server's own by {off:.0%}"

    def _wrong(self, endpoint: Endpoint, fault: str) -> UserError:
        layers = ", ".join(map(str, self._layers))
        return UserError(f"{endpoint.url} writes {fault}. It must extract the layers {layers}.", self._remedy)


class StreamedStates(OnlineStates):
    """Conversations with states that servers compute at every read."""

    stored = True
    client: ServedStates
    """Set before the first read."""

    def _states(self, indices: tuple[int, ...], layers: Sequence[int]) -> list[dict[int, Tensor] | str]:
        return self.client.states([self._tokens(index).tolist() for index in indices], layers)


def final_norm(model: FrozenModel) -> nn.Module:
    """Return the norm after the last layer; a UserError if the model has none."""
    norms: list[nn.Module] = [module for module in model.decoder.children() if "norm" in type(module).__name__.lower()]
    if not norms:
        raise UserError(
            f"{model.name} has no norm of its own after the last layer.",
            "Compute the states here: set data.states_server=null.",
        )
    return norms[-1]


@contextmanager
def _deleted(file: Path) -> Iterator[None]:
    """Delete a request's file and its lock at the end."""
    try:
        yield
    finally:
        for path in (file, _lock_of(file)):
            with suppress(OSError):
                path.unlink()


def _lock_of(file: Path) -> Path:
    return file.with_name(file.name + ".lock")
