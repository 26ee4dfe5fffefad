"""Reading logs for training: our own segments, and exchanges with serving engines.

An exchange is a JSON line with request and response bodies of OpenAI's API and the time:
{"request": {...}, "response": {...}, "time": 1790000000}. The time defaults to the response's "created"; later requests
validate heads trained on earlier ones. The answer is the engine's token ids if present (vLLM's `token_ids`, SGLang's
`output_ids` and `response_token_ids`, llama-server's `tokens`), its text otherwise.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from headstart.data.conversations.records import Conversation, tokens_key
from headstart.data.prompts.chat import (
    NOT_UTF8,
    Unfit,
    Unusable,
    is_utf8,
    prompt_tokens,
    read_messages,
    with_template_kwargs,
    with_tools,
)
from headstart.data.prompts.loading import MISSHAPEN, LeftOut
from headstart.data.served.log import Served, template_version
from headstart.errors import UserError
from headstart.model.frozen import FrozenModel
from headstart.support.files import no_folder

_PROCESSED = (
    *("logit_bias", "logits_processors", "logit_processors", "custom_logit_processor", "bad_words"),
    *("allowed_token_ids", "structured_outputs", "response_format", "grammar", "json_schema", "regex", "ebnf"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
"""Request fields that change the target's distribution."""
_NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "repeat_penalty": 1.0}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
_SHORTEST = 4
"""Minimum length of an answer, in tokens."""
_SERVED = TypeAdapter(Served)


def read_log(folder: Path, target: FrozenModel) -> tuple[list[Served], LeftOut]:
    """Read this target's own answers from a log, oldest first, truncated answers included; count the rest by reason.

    Raises:
        UserError: no such folder, or nothing in it.
    """
    if not folder.is_dir():
        raise no_folder(
            folder, "Let a decoder write one: headstart chat HEADS --log FOLDER, or headstart.load(log=...)."
        )
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise UserError(f"The log in {folder} is empty.", "Serve with it first, or put JSONL of an engine there.")
    left_out, found = LeftOut(), list[Served]()
    versions = target.identity().fingerprint, template_version(target.tokenizer)
    for where, row in _rows(files, left_out):
        try:
            served = _of_exchange(row, target) if "response" in row else _SERVED.validate_python(row)
            _check(served, target, *versions)
        except Unusable as reason:
            left_out.add(str(reason), where)
        except Unfit as misfit:
            left_out.add(misfit.reason, where)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            left_out.add(MISSHAPEN, f"{where}: {type(error).__name__} {error}")
        else:
            found.append(served)
    return sorted(found, key=lambda served: served.time), left_out


def choose_requests(
    served: Iterable[Served], per_source: int, left_out: LeftOut, known: Iterable[str] = ()
) -> list[Served]:
    """Keep the newest request of each prompt, at most `per_source` per known source, oldest first; count the rest.

    `known` holds keys (`tokens_key`) of prompts that count as seen.
    """
    seen, of_source, newest = set(known), Counter[str](), list[Served]()
    for item in sorted(served, key=lambda item: -item.time):
        key = tokens_key(item.prompt)
        if key in seen:
            left_out.add("that repeat a prompt")
        elif item.source and of_source[item.source] >= per_source:
            left_out.add(f"beyond {per_source} of one source", f"source {item.source}")
        else:
            seen.add(key)
            of_source[item.source] += 1
            newest.append(item)
    return newest[::-1]


def to_conversation(served: Served) -> Conversation:
    """Convert to a training conversation with the answer supervised and the source as category."""
    tokens, mask = [*served.prompt, *served.answer], [False] * len(served.prompt) + [True] * len(served.answer)
    name = f"{tokens_key(tokens)}-{served.time:.3f}"
    return Conversation(name, tokens, mask, [], served.source, sampling=served.sampling)


def _rows(files: Iterable[Path], left_out: LeftOut) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (file and line, object) of JSONL files."""
    for file in files:
        with suppress(FileNotFoundError), file.open("rb") as handle:  # a segment pruned meanwhile
            for number, line in enumerate(handle, start=1):
                where = f"{file.name}, line {number}"
                try:
                    row = json.loads(line.decode("utf-8-sig"))
                except ValueError:  # bytes that are not UTF-8, too
                    if line.strip():
                        reason = "damaged" if line.endswith(b"\n") else "half-written"
                        left_out.add(f"lines that are {reason}", where)
                    continue
                if b"\\u" in line and not is_utf8(row):
                    left_out.add(NOT_UTF8, where)
                elif not isinstance(row, dict):
                    left_out.add(MISSHAPEN, where)
                else:
                    yield where, row


def _check(served: Served, target: FrozenModel, fingerprint: str, template: str) -> None:
    """Raise `Unusable` for an answer of another distribution than this target's, or one that it cannot read."""
    tokens = [*served.prompt, *served.answer]
    if served.target not in ("", fingerprint):
        raise Unusable("of another target")
    if not served.prompt or not 0 <= min(tokens) <= max(tokens) < target.vocab_size:
        raise Unusable("with token ids that the target does not have")
    if served.template not in ("", template):
        raise Unusable("under another chat template")
    if served.sampling.get("processed"):
        raise Unusable("under penalties, logits processors or a grammar")
    if len(tokens) > target.max_length:
        raise Unusable(f"over the window of {target.max_length} tokens")
    if len(served.answer) < _SHORTEST:
        raise Unusable(f"with an answer of fewer than {_SHORTEST} tokens")


# -- exchanges with engines --------------------------------------------------------------------------------------------


def _of_exchange(row: Mapping[str, Any], target: FrozenModel) -> Served:
    """Convert an engine's exchange; raises `Unusable`, or a parsing error if malformed."""
    reply, request = row["response"], row["request"]
    choice = (reply.get("choices") or [reply])[0]
    message = choice.get("message") or {}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    finish = _finish(choice, reply)
    text = message.get("content") or choice.get("text") or reply.get("content") or ""
    given = (choice.get("token_ids"), choice.get("response_token_ids"), reply.get("output_ids"), reply.get("tokens"))
    answer = next((list(ids) for ids in given if ids), None)
    if answer is None and (message.get("tool_calls") or reasoning):
        raise Unusable("with reasoning or tool calls, and no token ids")
    if answer is None:
        answer = _read_text(text, finish, target)
    elif text and not reasoning and not _spells(answer, text, finish, target):
        raise Unusable("with token ids of another target: they do not spell the text")
    sampling = {name: request[name] for name in _SAMPLING if request.get(name) is not None}
    penalties = any(request.get(name, neutral) not in (None, neutral) for name, neutral in _NEUTRAL.items())
    forced = any(request.get(name) not in (None, {}, [], "", {"type": "text"}) for name in _PROCESSED)
    if penalties or forced:
        sampling["processed"] = True
    source = str(request.get("user") or request.get("safety_identifier") or "")
    source_hash = hashlib.sha256(source.encode()).hexdigest()[:12] if source else ""
    time = row.get("time") or reply.get("created")
    if time is None:
        raise Unusable('without a time (add "time", in seconds since 1970)')
    return Served(_prompt(request, reply, choice, target), answer, finish, float(time), sampling, source=source_hash)


def _prompt(
    request: Mapping[str, Any], reply: Mapping[str, Any], choice: Mapping[str, Any], target: FrozenModel
) -> list[int]:
    given = (reply.get("prompt_token_ids"), choice.get("prompt_token_ids"), request.get("input_ids"))
    ids = next((ids for ids in given if ids), None) or request.get("prompt") or request.get("text")
    if isinstance(ids, str):
        return list(target.tokenizer.encode(ids))
    if ids is None:
        templated = with_template_kwargs(target.tokenizer, request.get("chat_template_kwargs") or {})
        return prompt_tokens(read_messages(request["messages"]), with_tools(templated, request.get("tools") or []))
    return [int(token) for token in ids]


def _finish(choice: Mapping[str, Any], reply: Mapping[str, Any]) -> str:
    """Map the engine's finish reason to ours; `Unusable` if the answer was aborted."""
    about = reply.get("meta_info") or {}
    why = choice.get("finish_reason") or reply.get("stop_type") or about.get("finish_reason")
    why = why.get("type") if isinstance(why, dict) else why
    stopped = choice.get("stop_reason") or choice.get("matched_stop")
    if why in ("length", "limit"):
        return "length"
    if why in ("stop", "eos", "tool_calls"):
        return "stop" if isinstance(stopped, str) else "end"
    if why == "word":
        return "stop"
    raise Unusable("that were broken off")


def _read_text(text: str, finish: str, target: FrozenModel) -> list[int]:
    """Tokenise an answer given as text; drop the last token of a truncated one, which may be incomplete."""
    tokens = list(target.tokenizer.encode(text, add_special_tokens=False))
    if finish == "end":
        end = target.markup.end
        return [*tokens, end] if end in target.end_tokens else tokens
    return tokens[:-1]


def _spells(tokens: Sequence[int], text: str, finish: str, target: FrozenModel) -> bool:
    if max(tokens) >= target.vocab_size:
        return True  # `_check` rejects these ids later
    spelt, text = target.text_of(tokens).strip(), text.strip()
    return bool(spelt.startswith(text) if finish == "stop" else spelt == text)  # engines cut the stop string off
