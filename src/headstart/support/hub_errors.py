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
_NETWORK = "Check the network, and HF_HUB_OFFLINE and HF_ENDPOINT if they are set."
_TIMEOUT_SECONDS = 5.0


def absent(repo_id: str, file: str, revision: str | None = None, token: str | bool | None = None) -> UserError | None:
    """Return the error of reading a Hub repository, with one request; None without error, or in offline mode.

    transformers retries each of a dozen files, for most of a minute if the Hub is unreachable.
    """
    if constants.HF_HUB_OFFLINE:
        return None
    try:
        get_hf_file_metadata(hf_hub_url(repo_id, file, revision=revision), token=token, timeout=_TIMEOUT_SECONDS)
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
    text = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    match error, getattr(getattr(error, "response", None), "status_code", None):
        case HFValidationError(), _:
            reason, remedy = "that is not a Hub id.", "Write it as user/name."
        case RevisionNotFoundError(), _:
            reason, remedy = f"it has no revision {revision!r}.", "Give a branch, a tag or a commit hash of it."
        case GatedRepoError(), _:
            reason, remedy = "access has to be granted first.", f"Ask for it on its page. {LOGIN}"
        case RepositoryNotFoundError(), _:
            reason, remedy = "there is no such repository, or it is private.", f"Check the id. {LOGIN}"
        case HfHubHTTPError(), 401:
            reason, remedy = "the Hub does not accept the token.", LOGIN
        case HfHubHTTPError(), 403:
            reason, remedy = "the token lacks the right.", "Use a token with write access to this user or organisation."
        case HfHubHTTPError(), int(status):
            reason, remedy = f"the Hub answered {status} ({text}).", "Try again later."
        case OfflineModeIsEnabled() | LocalEntryNotFoundError() | ConnectionError(), _:
            reason, remedy = f"the Hub cannot be reached ({text}).", _NETWORK
        case _ if _is_network(error):
            reason, remedy = f"the Hub cannot be reached ({text}).", _NETWORK
        case _:
            reason, remedy = f"{type(error).__name__}: {text}", "Check the network and the disk."
    return UserError(f"{problem}: {reason}", remedy)


def _is_network(error: BaseException | None) -> bool:
    """Whether an error or one of its causes comes from the HTTP library: httpx, or httpx2 in newer clients."""
    while error is not None:
        if type(error).__module__.partition(".")[0].startswith("http"):
            return True
        error = error.__cause__ or error.__context__
    return False
