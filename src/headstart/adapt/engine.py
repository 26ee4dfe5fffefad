"""Check, by its accepted drafts, whether a serving engine drafts with the heads in service.

Engines do not reload heads while running, so they must be restarted. vLLM 0.32 updates draft weights only from a
training process on its own GPUs (`/start_draft_weight_update`, over NCCL or CUDA IPC), and `reload_weights` reads the
target's; SGLang 0.5 reads one folder into target and drafter alike (`/update_weights_from_disk`); llama-server has no
such call.
"""

from __future__ import annotations

from headstart.adapt.update import Update
from headstart.data.prompts.loading import LeftOut
from headstart.data.served.reading import choose_requests, read_log
from headstart.errors import UserError
from headstart.eval.audit_engine import record_engine, replay_acceptance
from headstart.hub.format import read_heads
from headstart.servers.process import engine_at

_PROMPTS, _TOKENS = 16, 64
_CLOSE = 0.05
"""Relative difference in expected tokens per round that is needed to tell heads apart on this few answers."""
_LOST = 0.1
"""Tolerated shortfall, relative: engines round differently."""


def check_engine(url: str, update: Update) -> tuple[str, bool]:
    """Send the newest logged prompts to an engine, one by one, and compare its tokens per round with replays.

    Returns:
        A sentence with the figures, and whether the engine drafts with the heads in service, as far as these can be
        told apart from the previous ones.

    Raises:
        UserError: no request fits into the target's context, the engine does not answer, its drafts are not those of
            heads like these, or it served other requests meanwhile.
    """
    remedy = "Give the address of an engine that serves the target with heads."
    engine, target, service = engine_at(url, "", remedy), update.target, update.service
    serving = service.serving
    numbers = [number for number in dict.fromkeys((serving, service.earlier)) if number is not None]
    heads = {number: read_heads(service.heads(number), target)[0] for number in numbers}
    # Replays read each answer and one more chain of drafts.
    longest = target.max_length - _TOKENS - max(each.draft_steps for each in heads.values())
    logged = [item for item in read_log(update.log, target)[0] if len(item.prompt) <= longest]
    newest = choose_requests(logged, _PROMPTS, LeftOut())[-_PROMPTS:]
    if not newest:
        raise UserError(f"{update.log} holds no request of at most {longest} tokens.", "Log such requests first.")
    recording = record_engine(engine, url, [item.prompt for item in newest], (), _TOKENS, (1,))
    rows = {number: replay_acceptance(recording, target, each, load=1) for number, each in heads.items()}
    rate, drafts = rows[serving]["tokens_per_round"], rows[serving]["drafts"]
    if rows[serving]["expected_tokens_per_round"] is None:
        raise UserError(rows[serving]["problem"] or f"{url} drafts another number of tokens in some rounds.", remedy)
    # Earlier heads that cannot draft as many tokens are not the engine's.
    expected = {number: each for number, row in rows.items() if (each := row["expected_tokens_per_round"]) is not None}
    told_apart = len(expected) == 1 or max(expected.values()) > (1 + _CLOSE) * min(expected.values())
    nearest = min(expected, key=lambda number: abs(expected[number] - rate))
    serves = rate > (1 - _LOST) * expected[serving] and (nearest == serving or not told_apart)
    each = ", ".join(f"{tokens:.2f} by update {number}" for number, tokens in expected.items())
    figures = f"{rate:.2f} tokens per round with {drafts} drafts; expected on these answers: {each}"
    return figures if told_apart else f"{figures}, too close to identify the heads", serves
