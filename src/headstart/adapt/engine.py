"""Check, by its accepted drafts, whether a serving engine drafts with the heads in service.

Engines do not reload heads while running, so they must be restarted. vLLM 0.32 updates draft weights only from a
training process on its own GPUs (`/start_draft_weight_update`, over NCCL or CUDA IPC), and `reload_weights` reads the
target's; SGLang 0.5 reads one folder into target and drafter alike (`/update_weights_from_disk`); llama-server has no
such call.
"""

from __future__ import annotations

from headstart.adapt.gate import replay_heads, tokens_per_round
from headstart.adapt.update import Update
from headstart.data.prompts.loading import LeftOut
from headstart.data.served.log import Served
from headstart.data.served.reading import choose_requests, read_log, to_conversation
from headstart.errors import UserError
from headstart.eval.audit_engine import record_engine
from headstart.hub.format import read_heads
from headstart.servers.process import engine_at
from headstart.tree.tree import TreeShape

_PROMPTS, _TOKENS = 16, 64
_CLOSE = 0.05
"""Relative difference in expected tokens per round that is needed to tell heads apart on this few answers."""
_LOST = 0.1
"""Tolerated shortfall, relative: engines round differently and draft past the end of a text."""


def check_engine(url: str, update: Update) -> tuple[str, bool]:
    """Send the newest logged prompts to an engine, one by one, and compare its tokens per round with a replay.

    Returns:
        A sentence with the figures, and whether the engine drafts with the heads in service, as far as these can be
        told apart from the previous ones.

    Raises:
        UserError: the engine does not answer, drafts nothing, or served other requests meanwhile.
    """
    remedy = "Give the address of an engine that serves the target with heads."
    engine, target = engine_at(url, "", remedy), update.target
    newest = choose_requests(read_log(update.log, target)[0], _PROMPTS, LeftOut())[-_PROMPTS:]
    prompts = [item.prompt for item in newest]
    batches = record_engine(engine, url, prompts, (), _TOKENS, (1,)).loads[1] if prompts else ()
    rounds, accepted = (sum(batch.counts[name] for batch in batches) for name in ("drafts", "accepted_tokens"))
    drafts = max((batch.drafts for batch in batches), default=0)
    if not drafts:
        raise UserError(f"{url} counts no drafts.", f"{remedy} llama-server counts with --metrics.")
    answers = [(prompts[batch.prompts[0]], list(batch.answers[0])) for batch in batches]
    texts = [to_conversation(Served(*each, "length", float(number))) for number, each in enumerate(answers)]
    service, expected = update.service, {}
    serving = service.serving
    for number in dict.fromkeys((serving, service.earlier)):
        if number is not None:
            heads = read_heads(service.heads(number), target)[0]
            replayed = replay_heads(target, heads, texts, TreeShape.chain(min(drafts, heads.draft_steps)).paths)
            expected[number] = tokens_per_round(replayed)
    rate = 1 + accepted / rounds
    told_apart = len(expected) == 1 or max(expected.values()) > (1 + _CLOSE) * min(expected.values())
    nearest = min(expected, key=lambda number: abs(expected[number] - rate))
    serves = rate > (1 - _LOST) * expected[serving] and (nearest == serving or not told_apart)
    each = ", ".join(f"{tokens:.2f} by update {number}" for number, tokens in expected.items())
    figures = f"{rate:.2f} tokens per round with {drafts} drafts; expected on these answers: {each}"
    return figures if told_apart else f"{figures}, too close to identify the heads", serves
