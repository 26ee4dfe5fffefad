"""Reachability of the Hub, and its client's errors as UserErrors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from headstart.errors import UserError

LOGIN = "Log in with `hf auth login`, or set HF_TOKEN; tokens are made at https://huggingface.co/settings/tokens."

_SECONDS = 5.0
"""Timeout of the Hub."""


def absent(repo_id: str, file: str, revision: str | None = None, token: str | bool | None = None) -> UserError | None:
    """Return why a Hub repository cannot be read now, with one request; None if it can, or in offline mode.

    transformers retries each of a dozen files, for most of a minute when the Hub is unreachable.
    """
    if constants.HF_HUB_OFFLINE:
        return None
    try:
        get_hf_file_metadata(hf_hub_url(repo_id, file, revision=revision), token=token, timeout=_SECONDS)
    except Exception as error:  # see `explained`
        return _explain(f"Cannot load the target {repo_id!r}", revision, error)
    return None


@contextmanager
def explained(doing: str, repo_id: str, revision: str | None = None) -> Iterator[None]:
    """Convert the Hub client's errors to a UserError that begins with `doing` ("Cannot fetch")."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # its own kinds, its HTTP library's and OSError
        raise _explain(f"{doing} {repo_id!r}", revision, error) from error


def _explain(problem: str, revision: str | None, error: Exception) -> UserError:
    if isinstance(error, HFValidationError):
        return UserError(f"{problem}: that is not a Hub id.", "Write it as user/name.")
    if isinstance(error, RevisionNotFoundError):
        return UserError(f"{problem}: it has no revision {revision!r}.", "Give a branch, a tag or a commit hash of it.")
    if isinstance(error, GatedRepoError):
        return UserError(f"{problem}: access has to be granted first.", f"Ask for it on its page. {LOGIN}")
    if isinstance(error, RepositoryNotFoundError):
        return UserError(f"{problem}: there is no such repository, or it is private.", f"Check the id. {LOGIN}")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, HfHubHTTPError) and status == 401:
        return UserError(f"{problem}: the Hub does not accept the token.", LOGIN)
    if isinstance(error, HfHubHTTPError) and status == 403:
        return UserError(
            f"{problem}: the token may not do that.", "Use a token with write access to this user or organisation."
        )
    if isinstance(error, HfHubHTTPError) and status is not None:
        return UserError(f"{problem}: the Hub answered {status} ({_first_line(error)}).", "Try again later.")
    if isinstance(error, OfflineModeIsEnabled | LocalEntryNotFoundError | ConnectionError) or _is_network(error):
        return UserError(
            f"{problem}: the Hub cannot be reached ({_first_line(error)}).",
            "Check the network, and HF_HUB_OFFLINE and HF_ENDPOINT if they are set.",
        )
    return UserError(f"{problem}: {type(error).__name__}: {_first_line(error)}", "Check the network and the disk.")


def _is_network(error: BaseException | None) -> bool:
    """Whether an error, or one it follows from, comes from the HTTP library: httpx, or httpx2 in newer clients."""
    while error is not None:
        if type(error).__module__.partition(".")[0].startswith("http"):
            return True
        error = error.__cause__ or error.__context__
    return False


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
