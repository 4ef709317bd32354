"""The manifest of a checkpoint: sizes and checksums of all files, written last and compared by file.

    manifest.json   {"chunk": 67108864, "files": {"model.safetensors": {"bytes": 512, "crc32": ["8a2f91c4"]}, …}}

A checksum for every 64 MiB, so that ranks share the reading when they check.
"""

from __future__ import annotations

import functools
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict

MANIFEST = "manifest.json"
CHUNK = 64 << 20
_BLOCK = 1 << 20  # bytes that are in memory at a time
_FORMAT = 1


class FileFacts(TypedDict):
    """The size of a file, bytes, and a checksum for every `CHUNK` bytes of it."""

    bytes: int
    crc32: list[str]


@dataclass(eq=False)
class Checksums:
    """CRC-32 of pieces of a file that are written in any order, none of them across a multiple of `CHUNK` bytes.

    Attributes: `pieces`, each as start, length and checksum.
    """

    pieces: list[tuple[int, int, int]] = field(default_factory=list)

    def update(self, data: bytes | memoryview, start: int) -> None:
        """Take note of these bytes, which belong at `start`."""
        rest = memoryview(data).cast("B")
        while len(rest):
            head = rest[: CHUNK - start % CHUNK]
            length = len(head)
            first, before, crc = self.pieces[-1] if self.pieces else (0, 0, 0)
            if before and first + before == start and start % CHUNK:  # goes on where the last one ends
                self.pieces[-1] = first, before + length, zlib.crc32(head, crc)
            else:
                self.pieces.append((start, length, zlib.crc32(head)))
            rest, start = rest[len(head) :], start + len(head)

    def facts(self) -> FileFacts:
        """Return the file's size and a checksum for every `CHUNK` bytes of it, as the manifest holds them.

        Raises:
            ValueError: some of its bytes were never written, or twice.
        """
        size = 0
        chunks: list[int] = []
        for start, length, crc in sorted(self.pieces):
            if start != size:
                raise ValueError(f"bytes {min(start, size)} to {max(start, size)} were written twice or not at all")
            if start % CHUNK:
                chunks[-1] = join_checksums(chunks[-1], crc, length)
            else:
                chunks.append(crc)
            size += length
        return {"bytes": size, "crc32": [f"{chunk:08x}" for chunk in chunks]}


def join_checksums(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two pieces after one another, from the CRC-32 of each and the second one's length, bytes.

    A checksum is the remainder of the bytes as a polynomial over GF(2). What comes after multiplies the first one's by
    x to the number of its bits.
    """
    return _multiply_modulo(first, _compute_power_of_x(8 * length)) ^ second


_GENERATOR, _ONE, _X = 0xEDB88320, 1 << 31, 1 << 30  # the highest power of x is the lowest bit


def _multiply_modulo(a: int, b: int) -> int:
    """Multiply two polynomials modulo CRC-32's generator."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_GENERATOR if b & 1 else 0)
    return product


@functools.lru_cache(maxsize=4096)
def _compute_power_of_x(exponent: int) -> int:
    if exponent < 2:
        return _X if exponent else _ONE
    half = _compute_power_of_x(exponent // 2)
    square = _multiply_modulo(half, half)
    return _multiply_modulo(square, _X) if exponent % 2 else square


def write_manifest(folder: str, known: Mapping[str, Checksums]) -> None:
    """Describe every file of the folder.

    Args:
        known: checksums by path of files that need not be read again.
    """
    paths = [os.path.join(place, file) for place, _, found in os.walk(folder) for file in found if file != MANIFEST]
    files = {os.path.relpath(path, folder): known.get(path) or _read_checksums(path) for path in paths}
    facts = {name: sums.facts() for name, sums in sorted(files.items())}
    manifest = {"format": _FORMAT, "chunk": CHUNK, "crc32": _format_crc_of(facts), "files": facts}
    with open(os.path.join(folder, MANIFEST), "w", encoding="utf-8") as out:
        json.dump(manifest, out, indent=1)


def has_manifest(folder: str) -> bool:
    """Return whether there is a manifest, whatever it says."""
    return os.path.isfile(os.path.join(folder, MANIFEST))


def find_damages(folder: str, share: int = 0, shares: int = 1) -> list[str]:
    """Return what is wrong with the folder's files, a line each; only every `shares`-th chunk of bytes is read.

    With `shares=0` nothing is read: missing files and wrong sizes only.
    """
    try:
        with open(os.path.join(folder, MANIFEST), encoding="utf-8") as file:
            manifest = json.load(file)
        if manifest["format"] != _FORMAT:
            raise ValueError(f"format {manifest['format']}, this version reads {_FORMAT}")
        if manifest["crc32"] != _format_crc_of(manifest["files"]) or manifest["chunk"] != CHUNK:
            raise ValueError("it differs from its own checksum")
        facts = manifest["files"]
    except (OSError, ValueError, KeyError) as error:
        return [f"{MANIFEST} cannot be read ({error})"]
    wrong, chunks = [], []
    for name, expected in facts.items():
        try:
            size = os.stat(os.path.join(folder, name)).st_size
        except OSError:
            wrong.append(f"{name} is missing")
            continue
        if size != expected["bytes"]:
            wrong.append(f"{name} has {size} of {expected['bytes']} bytes")
        else:
            chunks += [(name, place) for place in range(len(expected["crc32"]))]
    for name, place in chunks[share::shares] if shares else ():
        start, crc = place * CHUNK, 0
        with open(os.path.join(folder, name), "rb") as file:
            file.seek(start)
            while (rest := start + CHUNK - file.tell()) and (data := file.read(min(rest, _BLOCK))):
                crc = zlib.crc32(data, crc)
        if f"{crc:08x}" != facts[name]["crc32"][place]:
            end = min(start + CHUNK, facts[name]["bytes"])
            wrong.append(f"{name} differs from its checksum in bytes {start} to {end}")
    return wrong


def _format_crc_of(facts: dict[str, FileFacts]) -> str:
    return f"{zlib.crc32(json.dumps(facts, sort_keys=True).encode()):08x}"


def _read_checksums(path: str) -> Checksums:
    sums, start = Checksums(), 0
    with open(path, "rb") as file:
        while data := file.read(_BLOCK):
            sums.update(data, start)
            start += len(data)
    return sums
