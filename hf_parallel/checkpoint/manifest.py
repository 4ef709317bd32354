"""What a checkpoint must hold: sizes and checksums of all files, written last; what is missing or differs, by file.

    manifest.json   {"chunk": 67108864, "files": {"model.safetensors": {"bytes": 512, "crc32": ["8a2f91c4"]}, …}}

A checksum for every 64 MiB, so that ranks share the reading when they check.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MANIFEST = "manifest.json"
CHUNK = 64 << 20
_FORMAT = 1


@dataclass
class Checksums:
    """Size of a file, and a CRC-32 for every `CHUNK` bytes of it, from what is written."""

    size: int = 0
    chunks: list[int] = field(default_factory=list)

    def update(self, data: Any) -> None:
        """Take these bytes as the next ones."""
        rest = memoryview(data).cast("B")
        while len(rest):
            if self.size % CHUNK == 0:
                self.chunks.append(0)
            head = rest[: CHUNK - self.size % CHUNK]
            self.chunks[-1] = zlib.crc32(head, self.chunks[-1])
            self.size += len(head)
            rest = rest[len(head) :]

    def facts(self) -> dict[str, Any]:
        """As they stand in the manifest."""
        return {"bytes": self.size, "crc32": [f"{chunk:08x}" for chunk in self.chunks]}


def write_manifest(folder: str, known: Mapping[str, Checksums]) -> None:
    """Describe every file of the folder.

    Args:
        known: checksums by path of files that need not be read again.
    """
    files = {os.path.relpath(path, folder): known.get(path) or _read(path) for path in _files(folder)}
    facts = {name: sums.facts() for name, sums in sorted(files.items())}
    manifest = {"format": _FORMAT, "chunk": CHUNK, "crc32": _crc_of(facts), "files": facts}
    with open(os.path.join(folder, MANIFEST), "w", encoding="utf-8") as out:
        json.dump(manifest, out, indent=1)


def has_manifest(folder: str) -> bool:
    """Is there a manifest, whatever it says?"""
    return os.path.isfile(os.path.join(folder, MANIFEST))


def damages(folder: str, share: int = 0, shares: int = 1) -> list[str]:
    """What is wrong with the folder's files, a line each; of their bytes only every `shares`-th chunk is read.

    With `shares=0` nothing is read: missing files and wrong sizes only.
    """
    try:
        facts = _facts(folder)
    except (OSError, ValueError, KeyError) as error:
        return [f"{MANIFEST} cannot be read ({error})"]
    found = {name: _wrong_size(os.path.join(folder, name), expected) for name, expected in facts.items()}
    wrong = [f"{name} {text}" for name, text in found.items() if text]
    whole = [name for name, text in found.items() if not text]
    numbered = enumerate((name, place) for name in whole for place in range(len(facts[name]["crc32"])))
    for number, (name, place) in numbered:
        if shares and number % shares == share and not _equal(os.path.join(folder, name), facts[name], place):
            start, end = place * CHUNK, min((place + 1) * CHUNK, facts[name]["bytes"])
            wrong.append(f"{name} differs from its checksum in bytes {start} to {end}")
    return wrong


def _facts(folder: str) -> dict[str, Any]:
    with open(os.path.join(folder, MANIFEST), encoding="utf-8") as file:
        manifest = json.load(file)
    if manifest["format"] != _FORMAT:
        raise ValueError(f"format {manifest['format']}, this version reads {_FORMAT}")
    if manifest["crc32"] != _crc_of(manifest["files"]) or manifest["chunk"] != CHUNK:
        raise ValueError("it differs from its own checksum")
    return manifest["files"]


def _crc_of(facts: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(facts, sort_keys=True).encode()):08x}"


def _wrong_size(path: str, expected: dict[str, Any]) -> str | None:
    try:
        size = os.stat(path).st_size
    except OSError:
        return "is missing"
    return None if size == expected["bytes"] else f"has {size} of {expected['bytes']} bytes"


def _equal(path: str, expected: dict[str, Any], place: int) -> bool:
    with open(path, "rb") as file:
        file.seek(place * CHUNK)
        return f"{zlib.crc32(file.read(CHUNK)):08x}" == expected["crc32"][place]


def _read(path: str) -> Checksums:
    sums = Checksums()
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            sums.update(data)
    return sums


def _files(folder: str) -> Iterator[str]:
    for place, _, files in os.walk(folder):
        yield from (os.path.join(place, file) for file in files if file != MANIFEST)
