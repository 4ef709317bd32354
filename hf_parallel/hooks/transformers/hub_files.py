"""Files of the Hub while no Hub answers: transformers asks for half a minute before it says so."""

from __future__ import annotations

import os
from collections.abc import Callable

from hf_parallel.ask import hub
from hf_parallel.ask.spec import SpecError
from hf_parallel.hooks.patching import patch


@patch("transformers.utils.hub:cached_files", "asks a Hub that does not answer for half a minute")
def cached_files(
    original: Callable, path_or_repo_id: str | os.PathLike, filenames: list[str], *args: object, **kwargs: object
) -> list[str] | None:
    """Look only on this machine while no Hub answers.

    Raises:
        OSError: the original's own. If the script does not catch it, the run ends with one line that says what was
            asked for and what may have been meant.
    """
    reason = None
    own_ways = args or kwargs.get("local_files_only") or kwargs.get("repo_type")
    if not own_ways and hub.is_name(path_or_repo_id):
        files = tuple(os.path.join(str(kwargs.get("subfolder") or ""), name) for name in filenames)
        where = {key: kwargs.get(key) for key in ("cache_dir", "revision")}
        reason = hub.why_missing(str(path_or_repo_id), files, **where)  # type: ignore[arg-type]
    if reason is None:
        return original(path_or_repo_id, filenames, *args, **kwargs)
    try:
        return original(path_or_repo_id, filenames, **{**kwargs, "local_files_only": True})
    except OSError as error:
        advice = hub.like_a_model(str(path_or_repo_id)) or "load it once, or give a folder with the model"
        raise OSError(str(error)) from SpecError(f"{path_or_repo_id}: {reason}; {advice}")
