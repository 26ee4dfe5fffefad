"""Translation of a call of transformers' `generate` to the decode loop; unsupported arguments are refused here.

transformers builds lists of logits processors and stopping criteria from the generation config and the caller's own.
The decode loop implements some of them; these are removed from the lists, so that none is applied twice.

Shape suffixes: B rows (num_return_sequences included), L prompt tokens with padding, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitNormalization,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from headstart.decode.options import Processor
from headstart.errors import UserError

_WARPERS = (
    (MinPLogitsWarper, "min_p"),
    (TopPLogitsWarper, "top_p"),
    (TopKLogitsWarper, "top_k"),
    (TemperatureLogitsWarper, "temperature"),
)
"""Processors that the decode loop implements, last applied first, with the name of their value in both."""
_STATEFUL = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)
_WHOLE_BATCH = (
    PrefixConstrainedLogitsProcessor,
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
)
"""Processors that index rows of the batch; the decode loop calls them with one row."""
_PREPARED_KWARGS = {
    "attention_mask", "position_ids", "past_key_values", "cache_position", "logits_to_keep", "use_cache",
}  # fmt: skip
"""Model arguments that transformers prepares and the decode loop replaces; the first three are checked."""
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def _unsupported(problem: str, remedy: str = "Leave it out") -> UserError:
    return UserError(problem, f"{remedy}, or leave out custom_generate to decode with transformers' own loop.")


def check_mode(model: Any, config: Any, assistant_model: Any, synced_gpus: Any) -> None:
    """Raise UserError for generation modes and outputs that heads do not support."""
    if model.config.is_encoder_decoder:
        raise _unsupported(f"{type(model).__name__} is an encoder-decoder.", "Take a decoder-only model")
    mode = config.get_generation_mode(assistant_model)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise _unsupported(
            f"Heads decode greedily or by sampling, and these arguments ask for {mode.value.replace('_', ' ')}.",
            "Leave out num_beams, assistant_model, prompt_lookup_num_tokens, penalty_alpha, constraints and the like",
        )
    if synced_gpus:
        raise _unsupported("Heads cannot use a model that is sharded over processes.", "Load it in one process")
    for name in _OUTPUTS:
        if config.return_dict_in_generate and getattr(config, name, None):
            raise _unsupported(f"{name} is not available: verified rounds keep only tokens.")


@dataclass(frozen=True)
class Prompts:
    """Token ids of each row without padding, and the amount of padding before them."""

    rows: list[list[int]]
    padding: list[int]

    @classmethod
    def read(cls, input_ids_BL: Tensor, model_kwargs: Mapping[str, Any]) -> Prompts:
        """Strip the padding. Raises UserError for padding that is not on the left, and for inputs other than tokens."""
        for name, value in model_kwargs.items():
            if value is not None and name not in _PREPARED_KWARGS and not name.startswith("output_"):
                raise _unsupported(f"{name} cannot be given together with heads.")
        cache = model_kwargs.get("past_key_values")
        if cache is not None and (cache.get_seq_length() > 0 or getattr(cache, "_is_user_defined", False)):
            raise _unsupported("Heads cannot continue from past_key_values.", "Give the full text as input_ids")
        rows, length = input_ids_BL.shape
        mask_BL = model_kwargs.get("attention_mask")
        mask_BL = torch.ones_like(input_ids_BL) if mask_BL is None else mask_BL.to(input_ids_BL.device)
        padding_B1 = length - (mask_BL != 0).sum(-1, keepdim=True)
        usual_BL = torch.arange(length, device=mask_BL.device) - padding_B1
        if mask_BL.shape != (rows, length) or not torch.equal(mask_BL != 0, usual_BL >= 0):
            raise UserError("The attention mask has gaps or right padding.", "Tokenize with padding_side='left'.")
        positions_BL = model_kwargs.get("position_ids")
        if positions_BL is not None and not bool((positions_BL.to(usual_BL.device) == usual_BL)[usual_BL >= 0].all()):
            raise UserError("position_ids do not count from the first token of each row.", "Leave them out.")
        padding = padding_B1[:, 0].tolist()
        return cls([ids[skip:] for ids, skip in zip(input_ids_BL.tolist(), padding, strict=True)], padding)

    def groups(self, together: bool) -> list[list[int]]:
        """Return the rows to decode in one batch: all of them, or rows with the same padding."""
        if together:
            return [list(range(len(self.rows)))]
        return [[row for row, skip in enumerate(self.padding) if skip == size] for size in sorted(set(self.padding))]


@dataclass(frozen=True)
class LogitsChain:
    """A list of logits processors, split into `settings` of DecodeOptions and the `rest`.

    The decode loop applies the penalties first, then the rest in order, then the other settings.
    """

    settings: dict[str, Any]
    rest: list[Any]

    @classmethod
    def read(cls, processors: Sequence[Any], do_sample: bool, prompts: Prompts) -> LogitsChain:
        """Take processors off the ends of the list while the decode loop implements them in the same order.

        Raises UserError for a processor that cannot be applied at the nodes of a token tree.
        """
        rest = list(processors)
        for processor in rest:
            _check_processor(processor, prompts)
        while rest and type(rest[-1]) is LogitNormalization:
            rest.pop()  # the same distribution
        settings: dict[str, Any] = {"temperature": 1.0 if do_sample else 0.0}
        for kind, name in _WARPERS if do_sample else ():
            if rest and type(rest[-1]) is kind and _has_default_filter(rest[-1]):
                settings[name] = getattr(rest.pop(), name)
        if rest and type(rest[0]) is RepetitionPenaltyLogitsProcessor and not isinstance(_ignored(rest[0]), int):
            settings["repetition_penalty"] = rest.pop(0).penalty
        return cls(settings, rest)

    def processors(self, padding_ids: list[int]) -> tuple[Processor, ...]:
        """Return the rest, for rows that had this padding."""
        skip = len(padding_ids)
        row_wise = [
            RepetitionPenaltyLogitsProcessor(one.penalty, skip) if isinstance(_ignored(one), Tensor) else one
            for one in self.rest
        ]
        return tuple(Padded(one, padding_ids) if skip else one for one in row_wise)


@dataclass(frozen=True)
class Padded:
    """A processor that is called with the row's padding: some count positions from its start."""

    processor: Any
    padding_ids: list[int]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        padding = input_ids.new_tensor(self.padding_ids).expand(len(input_ids), -1)
        processed: Tensor = self.processor(torch.cat([padding, input_ids], dim=1), scores)
        return processed


def split_criteria(
    criteria: Sequence[Any], stop_strings: str | Sequence[str] | None, tokenizer: Any
) -> tuple[int, frozenset[int], StoppingCriteriaList]:
    """Split stopping criteria into the maximum length (padded prompt included), the end tokens, and the rest."""
    rest = StoppingCriteriaList(c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria))
    if stop_strings:
        if tokenizer is None:
            raise UserError(
                "stop_strings need a tokenizer, and transformers hands none to a callable.",
                "Give it here: custom_generate=headstart.custom_generate(heads, tokenizer=tokenizer).",
            )
        rest.append(StopStringCriteria(tokenizer, stop_strings))
    limit = min(c.max_length for c in criteria if type(c) is MaxLengthCriteria)
    ends = (end for c in criteria if type(c) is EosTokenCriteria for end in c.eos_token_id.tolist())
    return limit, frozenset(ends), rest


def _check_processor(processor: Any, prompts: Prompts) -> None:
    name, ignored = type(processor).__name__, _ignored(processor)
    if isinstance(processor, _STATEFUL):
        raise _unsupported(f"{name} keeps a state and cannot be applied to a token tree.")
    if isinstance(processor, _WHOLE_BATCH) and len(prompts.rows) > 1:
        raise _unsupported(f"{name} tells rows apart by their index in the batch.", "Give one prompt per call")
    if isinstance(ignored, Tensor) and ignored.tolist() != prompts.padding:
        raise _unsupported(f"{name} ignores a different number of tokens in each row.", "Give one number")


def _has_default_filter(warper: Any) -> bool:
    """Return whether a warper filters with -inf, down to a single token."""
    return getattr(warper, "min_tokens_to_keep", 1) == 1 and getattr(warper, "filter_value", -math.inf) == -math.inf


def _ignored(processor: Any) -> Any:
    """Return the prompt tokens that a repetition penalty ignores: None, one number for all rows, or a tensor [B]."""
    return processor.prompt_ignore_length if type(processor) is RepetitionPenaltyLogitsProcessor else None
