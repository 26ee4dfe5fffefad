"""The decode loop: a target with its drafters, and the checks before it decodes.

`DecodeLoop.generate` checks a request and decodes its rows, in batches that fit into memory. One round is
`Batch.round` in `batch.py`; verification is in `verify.py`. Plain decoding is the same loop without a drafter.

Shape suffixes: see `batch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from time import perf_counter

import torch

from headstart.decode.batch import Batch, Lane, Row
from headstart.decode.drafting import Drafting
from headstart.decode.memory import by_halves, memory_error, reserve
from headstart.decode.options import DecodeOptions, check_kinds, random_seed
from headstart.decode.sampling import check_processors, check_sampling
from headstart.decode.texts import Check, Generation, OnTokens
from headstart.decode.verify import SAMPLES_DRAFTS
from headstart.errors import UserError, check_text, nearest, out_of_memory
from headstart.model.model import Target


class DecodeLoop(Drafting):
    """Decodes prompts with a target and its drafters."""

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        options: DecodeOptions,
        on_tokens: OnTokens | None = None,
        check_on: Check | None = None,
    ) -> list[Generation]:
        """Decode a batch of tokenised prompts of any lengths. Batches that do not fit into memory are decoded in
        halves; each row keeps its number and seed.

        Raises:
            UserError: an empty or too long prompt, an option out of range, or a prompt that memory cannot hold.
        """
        started = perf_counter()
        check(self.target, prompts, options)
        seed = random_seed() if options.seed is None else options.seed
        rows = [
            Row(prompt, replace(options, seed=seed + number), started, number, on_tokens=on_tokens)
            for number, prompt in enumerate(prompts)
        ]
        if len(prompts) > 1:  # fail before decoding any prompt if one can never fit
            reserve(self.target, [max(prompts, key=len)], options.max_new_tokens, 1)
        try:
            with self.free_cores.limited() if self.free_cores else nullcontext():
                by_halves(range(len(prompts)), partial(self._decode, rows, check_on))
        except Exception as error:
            if not out_of_memory(error):
                raise
            raise memory_error(self.target) from error
        return [row.text for row in rows]

    def _decode(self, rows: Sequence[Row], check_on: Check | None, numbers: Sequence[int]) -> bool:
        """Decode these rows to their ends, continuing partial texts; return False, before any work, if they do not fit
        into memory together."""
        running = [rows[number] for number in numbers if not rows[number].ended]
        if not running:
            return True
        lane = Lane(self, running, check_on)
        if (cache := lane.new_cache()) is None:
            return False
        lane.begin(self.target.prefill(cache, [row.tokens for row in running], lane.aux_layers))
        batch = Batch(lane, cache, self.free_cores)
        while batch.drop_ended():
            batch.round()
        return True


# -- before the loop ---------------------------------------------------------------------------------------------------


def check_options(options: DecodeOptions, rows: int = 1) -> None:
    """Refuse (UserError) options that are invalid for every target; needs no loaded target."""
    check_kinds(options)
    if options.max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {options.max_new_tokens}.", "Use at least 1.")
    if options.logprobs is not None and options.logprobs < 0:
        raise UserError(f"logprobs is {options.logprobs}.", "Use the number of most likely tokens to add, or 0.")
    if options.min_new_tokens < 0:
        raise UserError(f"min_new_tokens is {options.min_new_tokens}.", "Use 0 for none, or a number of tokens.")
    if options.min_new_tokens > options.max_new_tokens:
        raise UserError(
            f"min_new_tokens is {options.min_new_tokens}, and max_new_tokens {options.max_new_tokens}.",
            "Raise --max-new-tokens, or lower --min-new-tokens.",
        )
    check_sampling(options)
    if options.verifier != "auto" and options.verifier not in SAMPLES_DRAFTS:
        raise UserError(f"Unknown verifier {options.verifier!r}.", nearest(options.verifier, ["auto", *SAMPLES_DRAFTS]))
    if options.draft not in ("auto", "on", "off"):
        raise UserError(f"draft is {options.draft!r}.", "Use auto, on or off.")
    if not all(options.stop_strings):
        raise UserError("A stop string is empty.", "Leave it out.")
    for stop in options.stop_strings:
        check_text(stop, "A stop string")
    if options.seed is not None and not -(1 << 63) <= options.seed <= (1 << 63) - max(rows, 1):
        raise UserError(
            f"seed is {options.seed}.", f"Use a number from -2^63 to 2^63 - {max(rows, 1)}; row b uses seed + b."
        )


def check(target: Target, prompts: Sequence[Sequence[int]], options: DecodeOptions) -> None:
    """Refuse (UserError) prompts and options that the target cannot decode, before any work."""
    check_options(options, len(prompts))
    check_processors(options, target.vocab_size, target.device)
    for name, ids in (("stop_token_ids", options.stop_token_ids), ("logit_bias", options.logit_bias or ())):
        if unknown := [token for token in ids if not 0 <= int(token) < target.vocab_size]:
            raise UserError(
                f"{name} has {unknown[0]}, and the target's token ids end at {target.vocab_size - 1}.",
                "Use token ids of the target.",
            )
    if options.stop_strings and target.tokenizer is None:
        raise UserError("Stop strings need a tokenizer.", "Load the target with its tokenizer.")
    if not prompts:
        raise UserError("There is no prompt.", "Give at least one prompt.")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"Prompt {number} is empty.", "Give each prompt at least one token.")
        if len(prompt) + options.max_new_tokens > target.max_length:
            which = "The prompt" if len(prompts) == 1 else f"Prompt {number}"
            raise UserError(
                f"{which} ({len(prompt)} tokens) plus {options.max_new_tokens} new tokens exceeds {target.name}'s "
                f"context of {target.max_length}.",
                "Shorten the prompt, or lower --max-new-tokens.",
            )
