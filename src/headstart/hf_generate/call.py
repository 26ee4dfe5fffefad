"""`custom_generate` for transformers: run the decode loop for a call of a model's `generate`.

A `Target` freezes the caller's model, puts it in eval mode and hooks its layers; all of that is undone after the call.
Prepared state is cached for the next call, without keeping the model alive.

Shape suffixes: B rows (num_return_sequences included), L prompt tokens with padding, N new tokens, S = L + N.
"""

from __future__ import annotations

import copy
import inspect
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import or_
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation import GenerateDecoderOnlyOutput

from headstart.api import Decoder, load
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions, Draft, LogitBias, TreeKind
from headstart.errors import UserError
from headstart.heads.io import WEIGHTS
from headstart.hf_generate.request import LogitsChain, Prompts, check_mode, split_criteria
from headstart.hub.pull import locate
from headstart.model.model import Target


def custom_generate(heads: str | Path, *, revision: str | None = None, tokenizer: Any = None) -> CustomGenerate:
    """Heads for transformers: `model.generate(**inputs, custom_generate=headstart.custom_generate(heads))`.

    Args:
        heads: a folder of heads, the folder of a run, or a Hub id (user/name).
        revision: branch, tag or commit of heads on the Hub.
        tokenizer: the model's; needed only for `stop_strings`.
    """
    return CustomGenerate(heads, revision, tokenizer)


def generate(
    model: Any,
    inputs: Tensor | None = None,
    generation_config: Any = None,
    tokenizer: Any = None,
    stop_strings: str | list[str] | None = None,
    revision: str | None = None,
    **kwargs: Any,
) -> Any:
    """Implement `model.generate(..., custom_generate=HEADS, trust_remote_code=True)` for heads in a Hub repository.

    Arguments that are not named here are passed on to `model.generate`.
    """
    heads = _caller_argument("custom_generate")
    if not isinstance(heads, str):
        raise UserError(
            "The heads are unknown outside a call of model.generate.",
            "Use model.generate(..., custom_generate=headstart.custom_generate(heads)).",
        )
    if getattr(model.generation_config, "stop_strings", None):
        raise UserError("model.generation_config has stop strings.", "Give stop_strings to generate instead.")
    if generation_config is not None and generation_config.stop_strings is not None:
        # With stop strings set, transformers requires a tokenizer, but passes none on to a callable.
        stop_strings = generation_config.stop_strings if stop_strings is None else stop_strings
        generation_config = copy.deepcopy(generation_config)
        generation_config.stop_strings = None
    call = CustomGenerate(heads, revision, tokenizer)
    return model.generate(inputs, generation_config, custom_generate=call, stop_strings=stop_strings, **kwargs)


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]  # transformers has no types
    """Output with `return_dict_in_generate=True`: `sequences`, and τ of each row, float [B]."""

    tokens_per_round: Tensor | None = None


@dataclass(eq=False)
class CustomGenerate:
    """Callable that transformers runs instead of its own loop."""

    heads: str | Path
    revision: str | None = None
    tokenizer: Any = None

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        generation_config: Any,
        *,
        stop_strings: str | Sequence[str] | None = None,
        drafter: str = DecodeOptions.drafter,
        tree: TreeKind | None = DecodeOptions.tree,
        draft: Draft = DecodeOptions.draft,
        deterministic: bool = DecodeOptions.deterministic,
        verifier: str = DecodeOptions.verifier,
        presence_penalty: float = DecodeOptions.presence_penalty,
        frequency_penalty: float = DecodeOptions.frequency_penalty,
        logit_bias: LogitBias | None = DecodeOptions.logit_bias,
        **model_kwargs: Any,
    ) -> Any:
        """Decode a batch prepared by transformers: `input_ids` are int64 [B, L], left-padded.

        Users pass `drafter` and the other named options to `model.generate`; see `DecodeOptions`.

        Returns:
            int64 [B, S], right-padded; a `SpeculativeOutput` with `return_dict_in_generate`.

        Raises:
            UserError: the heads are another model's, or an argument is not supported with heads.
        """
        streamer = _caller_argument("streamer")
        check_mode(model, generation_config, _caller_argument("assistant_model"), _caller_argument("synced_gpus"))
        prompts = Prompts.read(input_ids, model_kwargs)
        chain = LogitsChain.read(logits_processor, bool(generation_config.do_sample), prompts)
        limit, ends, criteria = split_criteria(stopping_criteria, stop_strings, self.tokenizer)
        text = _Text(input_ids, limit, ends, criteria, generation_config._pad_token_tensor, streamer)
        rates = torch.zeros(len(prompts.rows))
        errors: list[str] = []

        def decode(decoder: Decoder, loop: DecodeLoop, group: list[int]) -> None:
            padding = prompts.padding[group[0]]
            options = DecodeOptions(
                max_new_tokens=limit - input_ids.shape[1],
                seed=int(torch.randint(1 << 48, ())) if generation_config.do_sample else 0,
                ignore_end=True,  # `text` checks the end tokens of this call
                processors=chain.processors(input_ids[group[0], :padding].tolist()),
                verifier=verifier,
                draft=draft,
                deterministic=deterministic,
                presence_penalty=presence_penalty,
                frequency_penalty=frequency_penalty,
                logit_bias=logit_bias,
                stop_test=lambda index, tokens: text.ends(group[index], tokens),
                **chain.settings,
            )
            rows = [prompts.rows[row] for row in group]
            generations = loop.generate(rows, options, lambda index, tokens, _: text.add(group[index], tokens))
            decoder.remember(loop, rows, generations)
            rates[group] = torch.tensor([row.tokens_per_round for row in generations])
            errors.extend(row.drafter_error for row in generations if row.drafter_error)

        with decoder_for(model, self.heads, self.revision) as decoder:
            loop = decoder.loop(drafter, tree, draft != "off", deterministic)
            for group in prompts.groups(together=not chain.rest):
                decode(decoder, loop, group)
        if errors:
            warnings.warn(f"A drafter failed, and the rest was decoded without it: {errors[0]}", stacklevel=2)
        if streamer is not None:
            streamer.end()
        if not generation_config.return_dict_in_generate:
            return text.sequences_BS()
        return SpeculativeOutput(sequences=text.sequences_BS(), tokens_per_round=rates)


class _Text:
    """New tokens of a batch, passed on to the streamer."""

    def __init__(
        self, input_ids_BL: Tensor, limit: int, ends: frozenset[int], criteria: Any, pad: Tensor | None, streamer: Any
    ) -> None:
        rows, self._length = input_ids_BL.shape
        self._prompt_BL, self._limit, self._ends, self._criteria = input_ids_BL, limit, ends, criteria
        if pad is None and rows > 1 and criteria:
            raise UserError("Rows can end at different lengths and there is no pad token.", "Give pad_token_id.")
        self._pad = 0 if pad is None else int(pad)
        self._streamer, self._streamed = streamer, 0
        self._tokens: list[list[int]] = [[] for _ in range(rows)]
        self._ended = [False] * rows
        # Criteria get views of this buffer, to avoid copying the text for each token.
        self._buffer_BS = torch.nn.functional.pad(input_ids_BL, (0, limit - self._length))

    def ends(self, row: int, tokens: list[int]) -> bool:
        """Return whether a row ends with the last of its new tokens."""
        length = self._length + len(tokens)
        done = tokens[-1] in self._ends or length >= self._limit
        if self._criteria:
            self._buffer_BS[row, length - 1] = tokens[-1]
            done = bool(self._criteria(self._buffer_BS[row : row + 1, :length], None)) or done
        self._ended[row] = done
        return done

    def add(self, row: int, tokens: list[int]) -> None:
        """Append a row's next tokens, and stream the positions that all rows have reached."""
        self._tokens[row].extend(tokens)
        while self._streamer is not None and self._complete(self._streamed):
            self._streamer.put(torch.tensor(self._column(self._streamed)))
            self._streamed += 1

    def sequences_BS(self) -> Tensor:
        """Return prompts and new tokens, right-padded."""
        columns = [self._column(index) for index in range(max(map(len, self._tokens)))]
        return torch.cat([self._prompt_BL, self._prompt_BL.new_tensor(columns).T], dim=-1)

    def _complete(self, index: int) -> bool:
        """Return whether some row has reached this position, and every other one has reached it or ended."""
        reached = [len(tokens) > index for tokens in self._tokens]
        return any(reached) and all(map(or_, reached, self._ended))

    def _column(self, index: int) -> list[int]:
        return [tokens[index] if index < len(tokens) else self._pad for tokens in self._tokens]


def _caller_argument(name: str) -> Any:
    """Return an argument of the enclosing call of `generate` that transformers does not pass to a callable.

    A streamer must be ended, or its reader would block forever.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _GENERATE:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get(name)


_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__


@contextmanager
def decoder_for(model: Any, heads: str | Path, revision: str | None = None) -> Iterator[Decoder]:
    """Wrap the model as a target and yield a decoder with these heads; restore the model afterwards.

    Calls for the same model are serialised. Do not use the model's own `forward` inside the block.
    """
    prepared = _PREPARED.setdefault(model, _Prepared())
    with prepared.lock:
        modes = [(module, module.training) for module in model.modules()]
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        decoder = None
        try:
            decoder = prepared.decoder(model, heads, revision)
            model.eval()
            yield decoder
        finally:
            if decoder is not None:
                decoder.target.release()
            for module, training in modes:
                module.training = training
            for parameter in trainable:
                parameter.requires_grad_(True)


@dataclass
class _Prepared:
    """Cached state of one model: a target with prepacked weights per dtype and device, which all heads share.

    A decoder is keyed by heads, revision, dtype and device. The heads' file and its mtime show a new export.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    targets: dict[tuple[str, str], Target] = field(default_factory=dict)
    decoders: dict[tuple[str, str | None, str, str], tuple[Path, int, Decoder]] = field(default_factory=dict)

    def decoder(self, model: Any, heads: str | Path, revision: str | None) -> Decoder:
        weight = model.get_output_embeddings().weight
        local = Path(heads).expanduser()
        kind = str(weight.dtype), str(weight.device)
        key = (str(local.resolve()) if local.is_dir() else str(heads), revision, *kind)
        if key in self.decoders:
            file, written, decoder = self.decoders[key]
            if file.is_file() and file.stat().st_mtime_ns == written:
                return decoder
        folder = locate(heads, revision)
        target = self.targets.get(kind) or Target(model)
        target.model = model
        try:
            decoder = load(folder, target)
        finally:
            target.model = weakref.proxy(model)  # the cache must not keep the model alive
        self.targets[kind], file = target, folder / WEIGHTS
        self.decoders[key] = (file, file.stat().st_mtime_ns, decoder)
        return decoder


_PREPARED: weakref.WeakKeyDictionary[Any, _Prepared] = weakref.WeakKeyDictionary()
