"""Names of the Hub, looked at before anything is downloaded: is the file here, does a Hub answer, what may be meant.

huggingface_hub asks a Hub that does not answer six times, for half a minute, before it says so.
"""

from __future__ import annotations

import difflib
import importlib.resources
import json
import os
import re
import socket
import threading
import urllib.parse

#: Seconds in which a Hub must accept a connection, unless HF_HUB_ETAG_TIMEOUT gives them.
PATIENCE_S = 2.0
_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")


def is_name(source: object) -> bool:
    """Return whether a source is spelled like a name of the Hub, and is no file or folder."""
    return isinstance(source, str) and _NAME.fullmatch(source) is not None and not os.path.exists(source)


def why_missing(repo: str, files: tuple[str, ...], offline: str | None = None, **where: object) -> str | None:
    """Say why no file of a repository can be had; None if one of them is in the cache, or a Hub answers.

    Args:
        offline: why the Hub is not to be asked.
        where: other arguments of `from_pretrained`, of which `cache_dir` and `revision` are read.
    """
    from huggingface_hub import try_to_load_from_cache

    given = {key: where[key] for key in ("cache_dir", "revision") if where.get(key) is not None}
    for file in files:  # in the cache, or known not to exist
        if try_to_load_from_cache(repo, file, **given) is not None:  # type: ignore[arg-type]
            return None
    silence = offline or why_no_hub_answers()
    return silence and f"not on this machine, and {silence}"


def why_no_hub_answers() -> str | None:
    """Say why nothing can be had from the Hub; None if it, or the proxy before it, accepts a connection."""
    from urllib.request import getproxies, proxy_bypass

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE asks for nothing from the Hub"
    hub = urllib.parse.urlsplit(constants.ENDPOINT)
    proxies = getproxies()
    proxy = proxies.get(hub.scheme) or proxies.get("all")
    first = hub
    if proxy and hub.hostname and not proxy_bypass(hub.hostname):
        first = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    port = first.port or (80 if first.scheme == "http" else 443)
    seconds = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or PATIENCE_S)
    problems = [f"no answer in {seconds:g} s; HF_HUB_ETAG_TIMEOUT=30 waits longer"]

    def connect() -> None:
        try:
            socket.create_connection((first.hostname or "", port), timeout=seconds).close()
            problems.clear()
        except TimeoutError:
            pass
        except OSError as error:
            problems[0] = error.strerror or str(error)

    thread = threading.Thread(target=connect, daemon=True)  # because looking up a name has no time-out
    thread.start()
    thread.join(seconds + 0.1)
    return f"{hub.hostname} cannot be reached ({problems[0]})" if problems else None


def suggest_model(name: str) -> str | None:
    """Ask for models that are known here and are called alike; None: there are none."""
    from huggingface_hub import constants

    folders = os.listdir(constants.HF_HUB_CACHE) if os.path.isdir(constants.HF_HUB_CACHE) else []
    cached_models = {
        each.removeprefix("models--").replace("--", "/") for each in folders if each.startswith("models--")
    }
    known = sorted({*list_models_with_sizes(), *cached_models} - {name})
    by_short = {each.rpartition("/")[2].lower(): each for each in known}
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.8)
    short = difflib.get_close_matches(name.rpartition("/")[2].lower(), by_short, n=2, cutoff=0.85)
    found = list(dict.fromkeys([*close, *(by_short[each] for each in short)]))[:2]
    return f"did you mean {' or '.join(found)}?" if found else None


def list_models_with_sizes() -> dict[str, str]:
    """Return the config file of each model whose sizes come with this package, by name."""
    folder = importlib.resources.files("hf_parallel") / "recipes" / "models"
    files = [file for file in folder.iterdir() if file.name.endswith(".json")]
    return {str(json.loads(file.read_text(encoding="utf-8"))["model"]): os.path.relpath(str(file)) for file in files}
