"""A small server in place of vLLM or llama-server: it answers from a tiny model, with exported heads if given.

    python -m rehearsal.stand_in vllm serve TARGET --port N [--speculative-config JSON] ...
    python -m rehearsal.stand_in llama-server -m TARGET --port N [-md HEADS.gguf --spec-draft-n-max N] ...

It decodes with headstart's own loop, so its speed and rounding are not an engine's. Heads are read from the exported
files. With `extract_hidden_states` it writes states as vLLM's connector does. Unknown options are ignored. `--plant`
adds one of the `FAULTS` of real engines.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.append(str(Path(__file__).resolve().parents[1]))  # last: its links are called train, data, eval ...

import headstart
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.drafters.heads import HeadDrafter
from headstart.hub.engines.importing import import_heads
from headstart.model.loading import load_target
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from headstart.tree.tree import TreeShape
from rehearsal.engine_http import StandIn, serve

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
FAULTS = {
    "layer ids + 1": lambda config: {LAYER_IDS: [layer + 1 for layer in config[LAYER_IDS]]},
    "layer ids - 1": lambda config: {LAYER_IDS: [layer - 1 for layer in config[LAYER_IDS]]},
    "rotary base": lambda config: {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "norm_output": lambda config: {"norm_output": not config.get("norm_output", False)},
    "template": None,
    "tokens": None,
}
"""Faults by name: changes to the heads' config, a chat template of its own, and a wrong token in each answer."""


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    kind = {"vllm": "vllm", "llama-server": "llama.cpp"}[words.pop(0)]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    if kind == "vllm":
        parser.add_argument("serve")
        parser.add_argument("target")
    else:
        parser.add_argument("-m", dest="target", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", "--alias", dest="name")
    parser.add_argument("--max-model-len", type=lambda value: None if value == "auto" else int(value))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--speculative-config", type=json.loads, default={})
    parser.add_argument("--kv-transfer-config", type=json.loads, default={})
    parser.add_argument("-md", dest="heads", type=Path)
    parser.add_argument("--spec-draft-n-max", type=int, default=0)
    parser.add_argument("--plant", choices=FAULTS, default="")
    options, _ = parser.parse_known_args(words)

    target = load_target(options.target, options.dtype, "cpu")
    config = options.speculative_config
    states = config.get("method") == "extract_hidden_states"
    drafts = 0 if states else int(config.get("num_speculative_tokens", options.spec_draft_n_max))
    writer = Writer(target, options.heads or Path(config.get("model", "")), drafts, options.plant)
    stand_in = writer.serving(kind, options.name or options.target, options.max_model_len)
    if states:
        place = Path(options.kv_transfer_config["kv_connector_extra_config"]["shared_storage_path"])
        layers = config["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
        stand_in.answer = States(target, layers, place).answer
    serve(stand_in, options.host, options.port)


class Writer:
    """Continues prompts one by one, with a chain of drafts if there are exported heads."""

    stand_in: StandIn

    def __init__(self, target: Target, exported: Path, drafts: int, fault: str = "") -> None:
        self._target, self._drafts, self._fault, self._lock = target, drafts, fault, Lock()
        self._pause = float(os.environ.get("REHEARSAL_PAUSE", 0))
        drafter = None
        if drafts:
            with TemporaryDirectory() as place:
                if change := FAULTS.get(fault):
                    exported = Path(copytree(exported, Path(place) / "changed"))
                    config = json.loads((exported / "config.json").read_text())
                    (exported / "config.json").write_text(json.dumps(config | change(config)))
                import_heads(exported, target, Path(place) / "heads")
                heads = headstart.load(Path(place) / "heads", target).heads
                assert heads is not None
                drafter = HeadDrafter(heads, TreeShape.chain(drafts))
        self._loop = DecodeLoop(target, *([drafter] if drafter else []))

    def serving(self, kind: str, model: str, window: int | None = None) -> StandIn:
        """Return the server's interface."""
        tokenizer, self._past_end = self._target.tokenizer, kind == "vllm"
        self.stand_in = StandIn(
            kind,
            self.answer,
            drafts=self._drafts,
            model=model,
            window=window or self._target.max_length,
            tokenize=lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
            render=(self.chat, lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True))),
            accepted=[0] * self._drafts,
        )
        return self.stand_in

    def answer(self, prompt: list[int], most: int, body: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        """Answer a prompt. The last drafts of vLLM may reach past the end."""
        time.sleep(self._pause)
        asked = DecodeOptions(
            min(most + self._drafts, self._target.max_length - len(prompt)),
            temperature=body["temperature"],
            top_k=max(0, body.get("top_k", 0)),
            top_p=body.get("top_p", 1.0),
            seed=body.get("seed"),
            draft="on",
            ignore_end=True,
        )
        ends = {*body.get("stop_token_ids", ())} | (set() if body.get("ignore_eos") else {*self._target.end_tokens})
        with self._lock:
            (written,) = self._loop.generate([prompt], asked)
            assert written.drafter_error is None, written.drafter_error
            tokens = list(written.tokens[:most])
            at_end = next((place for place, token in enumerate(tokens) if token in ends), None)
            tokens = tokens if at_end is None else tokens[: at_end + 1]
            count, drafted, before = 1, 0, sum(self.stand_in.accepted)
            for done in written.rounds if self._drafts else ():
                room = self._drafts if self._past_end else min(self._drafts, most - count - 1)
                if done.nodes > 1 and room > 0 and count < len(tokens):
                    self.stand_in.rounds += 1
                    drafted += room
                    for place in range(min(done.emitted - 1, room)):
                        self.stand_in.accepted[place] += 1
                count += done.emitted
            timings = {"draft_n": drafted, "draft_n_accepted": sum(self.stand_in.accepted) - before}
        if self._fault == "tokens":
            tokens[-1] = (tokens[-1] + 1) % self._target.vocab_size
        return tokens, {"stop_type": "limit" if at_end is None else "eos", "timings": timings}

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        if self._fault == "template":
            messages = [{"role": "system", "content": "Be brief."}, *messages]
        rendered = self._target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return list(rendered)


class States:
    """Writes the target's hidden states of every prompt that it reads, as vLLM's connector does."""

    def __init__(self, target: Target, layers: Sequence[int], folder: Path) -> None:
        self._target, self._layers, self._folder = target, layers, folder
        self._lock, self._numbers = Lock(), count()

    def answer(self, prompt: list[int], most: int, body: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        asked = body.get("prompt_logprobs") is not None
        with self._lock:
            (states,) = self._target.hidden_states([prompt], [*self._layers, FINAL])
            more = {"prompt_logprobs": prompt_logprobs(self._target, prompt, states[FINAL])}
            tensors = {
                "hidden_states": torch.stack([states[layer] for layer in self._layers], dim=1).contiguous(),
                "token_ids": torch.tensor(prompt, dtype=torch.int64),
            }
            self._folder.mkdir(parents=True, exist_ok=True)
            file = self._folder / f"cmpl-{next(self._numbers)}-0-{os.getpid():x}.safetensors"
            save_file(tensors, file)
        return [0], {"kv_transfer_params": {"hidden_states_path": str(file)}, **(more if asked else {})}


def prompt_logprobs(target: Target, prompt: Sequence[int], final_TE: torch.Tensor) -> list[Any]:
    """Return the log-probability of each token of a prompt, as vLLM does."""
    logits_TV = target.lm_head(final_TE[:-1]).float().log_softmax(-1)
    pairs = enumerate(prompt[1:])
    return [None, *({str(token): {"logprob": float(logits_TV[place, token])}} for place, token in pairs)]


if __name__ == "__main__":
    main()
