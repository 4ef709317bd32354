"""prove.json: what was proved, with which versions; and the line about it at the start of the real run."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import subprocess
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from hf_parallel.version import VERSION

FILE = "prove.json"
_LIBRARIES = ("torch", "transformers", "accelerate", "peft", "trl")


def read_library_versions() -> dict[str, str]:
    """Return the versions of the libraries that training depends on, as far as they are installed."""
    found = {"hf_parallel": VERSION}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hash_of_script(script: str) -> str:
    """Hash the file's contents, or the name of a module."""
    path = Path(script)
    return hashlib.sha256(path.read_bytes() if path.is_file() else script.encode()).hexdigest()[:16]


def write_proof(file: Path, script: str, spec: str, facts: Mapping[str, Any]) -> None:
    """Add a proof to the file, in the place of a former one of this script and layout."""
    folder, commit = Path(script).resolve().parent if Path(script).exists() else Path.cwd(), None
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        asked = ["git", "rev-parse", "HEAD"]
        done = subprocess.run(asked, cwd=folder, capture_output=True, text=True, timeout=5, check=False)
        commit = done.stdout.strip() or None
    proof = {
        "script": script,
        "script_hash": hash_of_script(script),
        "spec": spec,
        "date": date.today().isoformat(),
        "versions": read_library_versions(),
        "commit": commit,
        **facts,
    }
    kept = [one for one in _read_certificates(file) if (one["script"], one["spec"]) != (script, spec)]
    file.write_text(json.dumps({"proofs": [*kept, proof]}, indent=2) + "\n")


def format_line_about(script: str, spec: str, file: Path | None = None) -> str | None:
    """Return the line that a run says about its proof; None if there is none, or the script has changed since."""
    hashed = hash_of_script(script) if Path(script).is_file() else None
    for proof in _read_certificates(file or Path(FILE)):
        if proof.get("script_hash") != hashed or proof.get("spec") != spec:
            continue
        if not proof.get("proved"):
            return f"{FILE} of {proof['date']} found differences from one process under this layout"
        then, now = proof["versions"], read_library_versions()
        other = [f"{name} {then[name]}" for name in then if then[name] != now.get(name)]
        if other:
            return f"proved on {proof['date']} for this layout with other versions ({', '.join(other)})"
        return f"proved on {proof['date']} for this layout"
    return None


def _read_certificates(file: Path) -> list[dict[str, Any]]:
    try:
        return json.loads(file.read_text())["proofs"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
