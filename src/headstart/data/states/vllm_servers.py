"""Hidden states asked for from vLLM servers that write them to a folder which both sides see; see `vllm_files`."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

from headstart.data.states.vllm_files import Import, Unusable
from headstart.errors import UserError
from headstart.servers.client import Endpoint, Later, Pool, Refused, or_refusal
from headstart.servers.completions import Ask, served_by

_RESTART = "Start it as headstart data import-states RECIPE shows; then the same command goes on from there."


def take_from_servers(
    urls: Sequence[str],
    work: Import,
    requests: int | None,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Let servers read every conversation that is waiting and take what they write; their files are removed.

    So many `requests` are under way over all of them. `advance` is called with (tokens done, tokens in all).
    """
    waiting = work.waiting
    total, done, taken, refusals = sum(len(item.tokens) for item in waiting), 0, 0, list[Refused]()

    def ask(number: int, endpoint: Endpoint) -> Path:
        return _written(endpoint, work.target.spec, waiting[number].tokens)

    try:
        with closing(Pool(urls, requests, _RESTART).answers(len(waiting), or_refusal(ask))) as files:
            for number, file in files:
                done += len(waiting[number].tokens)
                advance(done, total)
                if isinstance(file, Refused):
                    refusals.append(file)
                    work.left_out.setdefault("the server refuses its tokens", []).append(waiting[number].id)
                    continue
                try:
                    work.take(file, waiting[number].tokens)
                except Unusable as problem:
                    raise UserError(f"{file}, which vLLM wrote: {problem}.", _RESTART) from None
                for path in (file, _lock_of(file)):
                    with suppress(OSError):
                        path.unlink()
                taken += 1
        if refusals and not taken:
            raise refusals[0]
    finally:
        work.close()  # what was taken before a failure as well: its files are gone


def _written(endpoint: Endpoint, spec: str, tokens: Sequence[int]) -> Path:
    """Let a server read token ids; the file that it has written their states to."""
    served = endpoint.once(lambda endpoint: served_by(endpoint, spec))
    path, body = served.dialect.request(Ask(tokens, 1), served.model)
    page = endpoint.ask("POST", path, body)
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
            f"{endpoint.url} says it wrote {file}, and there is no such file here.",
            "shared_storage_path has to be a folder that the server and this machine both see under this name.",
        )
    if not file.is_file():
        raise Later(f"it did not write {file}")
    return file


def _lock_of(file: Path) -> Path:
    return file.with_name(file.name + ".lock")
