"""`custom_generate` for transformers: from a call of a model's `generate` to the decode loop, and back.

A `Target` freezes its model, puts it in eval mode and hooks its layers. Here the model belongs to somebody else: all of
that is taken back when the call ends, and what was prepared is kept for the next call without keeping the model alive.

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
from headstart.decode.loop import DecodeLoop, Generation
from headstart.decode.options import DecodeOptions, Draft, TreeKind
from headstart.errors import UserError
from headstart.heads.io import WEIGHTS
from headstart.hf_generate.request import Ending, LogitsChain, Prompts, check_mode
from headstart.hub.pull import locate
from headstart.target.model import Target


def custom_generate(heads: str | Path, *, revision: str | None = None, tokenizer: Any = None) -> CustomGenerate:
    """Heads for transformers: `model.generate(**inputs, custom_generate=headstart.custom_generate(heads))`.

    Args:
        heads: a folder of heads, the folder of a run, or a Hub id (user/name).
        revision: branch, tag or commit of heads on the Hub.
        tokenizer: of the model; needed for `stop_strings` only.
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
    """What `model.generate(..., custom_generate=HEADS, trust_remote_code=True)` runs when HEADS are a repository.

    The arguments are those of `model.generate`; all but those named here go on to it.
    """
    heads = _caller_argument("custom_generate")
    if not isinstance(heads, str):
        raise UserError(
            "Which heads to use is not known outside a call of model.generate.",
            "Use model.generate(..., custom_generate=headstart.custom_generate(heads)).",
        )
    if getattr(model.generation_config, "stop_strings", None):
        raise UserError(
            "model.generation_config has stop strings.", "Set them to None there, and give stop_strings to generate."
        )
    if generation_config is not None and generation_config.stop_strings is not None:
        # transformers asks for a tokenizer at the sight of them, and has none left when it calls a callable.
        generation_config = copy.deepcopy(generation_config)
        stop_strings = stop_strings if stop_strings is not None else generation_config.stop_strings
        generation_config.stop_strings = None
    call = CustomGenerate(heads, revision, tokenizer)
    return model.generate(inputs, generation_config, custom_generate=call, stop_strings=stop_strings, **kwargs)


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]  # transformers has no types
    """What `return_dict_in_generate=True` gives: `sequences`, and τ of each row, float [B]."""

    tokens_per_round: Tensor | None = None


@dataclass(eq=False)
class CustomGenerate:
    """What transformers calls instead of its own loop; made by `custom_generate`."""

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
        **model_kwargs: Any,
    ) -> Any:
        """Decode a batch that transformers has prepared: `input_ids` are int64 [B, L], padded on the left.

        `drafter`, `tree`, `draft`, `deterministic` and `verifier` are as in `DecodeOptions`, and can be given to
        `model.generate`.

        Returns:
            int64 [B, S], rows that ended early padded on the right; a `SpeculativeOutput` with
            `return_dict_in_generate`.

        Raises:
            UserError: heads of another model, or an argument that decoding with heads cannot honour.
        """
        streamer = _caller_argument("streamer")
        check_mode(model, generation_config, _caller_argument("assistant_model"), _caller_argument("synced_gpus"))
        prompts = Prompts.read(input_ids, model_kwargs)
        chain = LogitsChain.read(logits_processor, bool(generation_config.do_sample), prompts)
        ending = Ending.read(stopping_criteria, stop_strings, self.tokenizer)
        text = _Text(input_ids, ending, generation_config._pad_token_tensor, streamer)
        generations: dict[int, Generation] = {}

        def decode(loop: DecodeLoop, group: list[int]) -> list[Generation]:
            padding = prompts.padding[group[0]]
            options = DecodeOptions(
                max_new_tokens=ending.limit - input_ids.shape[1],
                seed=int(torch.randint(1 << 48, ())) if generation_config.do_sample else 0,
                ignore_end=True,  # `text` knows the ends of this call
                processors=chain.processors(input_ids[group[0], :padding].tolist()),
                verifier=verifier,
                draft=draft,
                deterministic=deterministic,
                stop_test=lambda index, tokens: text.ends(group[index], tokens),
                **chain.settings,
            )
            rows = [prompts.rows[row] for row in group]
            decoded = loop.generate(rows, options, lambda index, tokens, _: text.add(group[index], tokens))
            decoder.remember(loop, rows, decoded)
            return decoded

        with decoder_for(model, self.heads, self.revision) as decoder:
            loop = decoder.loop(drafter, tree, draft != "off", deterministic)
            for group in prompts.groups(together=not chain.rest):
                generations.update(zip(group, decode(loop, group), strict=True))
        if error := next((row.drafter_error for row in generations.values() if row.drafter_error), None):
            warnings.warn(f"A drafter failed, and the rest was decoded without it: {error}", stacklevel=2)
        if streamer is not None:
            streamer.end()
        if not generation_config.return_dict_in_generate:
            return text.sequences_BS()
        rates = [generations[row].tokens_per_round for row in range(len(generations))]
        return SpeculativeOutput(sequences=text.sequences_BS(), tokens_per_round=torch.tensor(rates))


class _Text:
    """The new tokens of a batch while they come in: where each row ends, what the streamer has seen."""

    def __init__(self, input_ids_BL: Tensor, ending: Ending, pad: Tensor | None, streamer: Any) -> None:
        rows, self._length = input_ids_BL.shape
        self._prompt_BL = input_ids_BL
        self._ending = ending
        if pad is None and rows > 1 and ending.criteria:
            raise UserError("Rows can end at different places and there is no pad token.", "Give pad_token_id.")
        self._pad = 0 if pad is None else int(pad)
        self._streamer = streamer
        self._streamed = 0
        self._tokens: list[list[int]] = [[] for _ in range(rows)]
        self._ended = [False] * rows
        # Criteria get views of this, so that a long text is not copied for each token.
        self._seen_BS = torch.nn.functional.pad(input_ids_BL, (0, ending.limit - self._length))

    def ends(self, row: int, tokens: list[int]) -> bool:
        """Whether a row ends with the last of these tokens, which are all of its new ones so far."""
        length = self._length + len(tokens)
        done = tokens[-1] in self._ending.ends or length >= self._ending.limit
        if self._ending.criteria:
            self._seen_BS[row, length - 1] = tokens[-1]
            done = bool(self._ending.criteria(self._seen_BS[row : row + 1, :length], None)) or done
        self._ended[row] = done
        return done

    def add(self, row: int, tokens: list[int]) -> None:
        """Take a row's next tokens, and hand on to the streamer what all rows have reached."""
        self._tokens[row].extend(tokens)
        while self._streamer is not None and self._complete(self._streamed):
            self._streamer.put(torch.tensor(self._column(self._streamed)))
            self._streamed += 1

    def sequences_BS(self) -> Tensor:
        """Prompts and new tokens, rows that ended early padded on the right."""
        columns = [self._column(index) for index in range(max(map(len, self._tokens)))]
        return torch.cat([self._prompt_BL, self._prompt_BL.new_tensor(columns).T], dim=-1)

    def _complete(self, index: int) -> bool:
        """Whether every row has reached this place or ended before it, and one has reached it."""
        reached = [len(tokens) > index for tokens in self._tokens]
        return any(reached) and all(map(or_, reached, self._ended))

    def _column(self, index: int) -> list[int]:
        return [tokens[index] if index < len(tokens) else self._pad for tokens in self._tokens]


def _caller_argument(name: str) -> Any:
    """An argument of the call of `generate` that is running; transformers does not hand all of them to a callable.

    A streamer that is not handed on would never be ended, and whoever reads from it would wait for ever.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not _GENERATE:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get(name)


_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__


# -- a plain transformers model as a target, for the time of one call --------------------------------------------------


@contextmanager
def decoder_for(model: Any, heads: str | Path, revision: str | None = None) -> Iterator[Decoder]:
    """A decoder of this model and these heads; the model is as before when the block ends.

    Calls for the same model wait for each other. While the block runs, the model's own `forward` is not to be used.
    """
    prepared = _PREPARED.setdefault(model, _Prepared())
    with prepared.lock, _restored(model):
        decoder = prepared.decoder(model, heads, revision)
        model.eval()
        try:
            yield decoder
        finally:
            decoder.target.release()


@dataclass
class _Prepared:
    """What is ready for one model.

    All heads share a target, with its prepacked weights, for each dtype and device. Decoders are kept by heads,
    revision, dtype and device; with the file of the heads and when it was written, to notice heads that were exported
    again.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)  # one call at a time
    targets: dict[tuple[str, str], Target] = field(default_factory=dict)
    decoders: dict[tuple[str, str | None, str, str], tuple[Path, int, Decoder]] = field(default_factory=dict)

    def decoder(self, model: Any, heads: str | Path, revision: str | None) -> Decoder:
        weight = model.get_output_embeddings().weight
        local = Path(heads).expanduser()
        name = str(local.resolve()) if local.is_dir() else str(heads)
        kind = str(weight.dtype), str(weight.device)
        key = (name, revision, *kind)
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
            target.model = weakref.proxy(model)  # what is kept here must not keep the model
        self.targets[kind] = target
        self.decoders[key] = (folder / WEIGHTS, (folder / WEIGHTS).stat().st_mtime_ns, decoder)
        return decoder


_PREPARED: weakref.WeakKeyDictionary[Any, _Prepared] = weakref.WeakKeyDictionary()


@contextmanager
def _restored(model: Any) -> Iterator[None]:
    """Undo everything that wrapping a model as a target and decoding with it changes about it."""
    training = [(module, module.training) for module in model.modules()]
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        yield
    finally:
        for module, mode in training:
            module.training = mode
        for parameter in learning:
            parameter.requires_grad_(True)
