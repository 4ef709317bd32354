"""Manifests in chunks, folders that a crash has left between two names, and deletion."""

import itertools
import os
import random
import zlib

import pytest

from hf_parallel.checkpoint import folder, list_whole_checkpoints, manifest, put_back_former, remove


@pytest.fixture
def described(tmp_path, monkeypatch):
    """A folder of two files in chunks of eight bytes, and its manifest."""
    monkeypatch.setattr(manifest, "CHUNK", 8)
    (tmp_path / "sub").mkdir()
    (tmp_path / "a").write_bytes(bytes(range(20)))
    (tmp_path / "sub" / "b").write_bytes(b"")
    manifest.write_manifest(str(tmp_path), {str(tmp_path / "a"): sums_of((0, 3), (3, 19), (19, 20))})
    return tmp_path


def sums_of(*pieces: tuple[int, int]) -> manifest.Checksums:
    """Of the numbers up to 20, written in these pieces."""
    sums = manifest.Checksums()
    for start, end in pieces:
        sums.update(bytes(range(start, end)), start)
    return sums


def test_chunks_are_those_of_the_file_however_it_was_written(described):
    assert manifest.find_damages(str(described)) == []
    facts = manifest._read_checksums(str(described / "a")).facts()
    assert facts["bytes"] == 20
    assert facts["crc32"] == [f"{zlib.crc32(bytes(range(a, min(a + 8, 20)))):08x}" for a in (0, 8, 16)]
    for pieces in itertools.permutations([(0, 1), (1, 6), (6, 8), (8, 15), (15, 20)]):  # by several ranks
        assert sums_of(*pieces).facts() == facts


@pytest.mark.parametrize(
    ("pieces", "wrong"), [([(0, 8), (9, 20)], (8, 9)), ([(0, 9), (8, 20)], (8, 9)), ([(3, 20)], (0, 3))]
)
def test_bytes_that_nobody_has_written_are_noticed(described, pieces, wrong):
    with pytest.raises(ValueError, match=r"bytes {} to {}\b".format(*wrong)):
        sums_of(*pieces).facts()


def test_checksums_of_two_pieces_are_joined():
    data = random.Random(1).randbytes(3000)
    for cut in (1, 2, 7, 1024, 2999):
        first, second = data[:cut], data[cut:]
        assert manifest.join_checksums(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(data)


def test_each_rank_reads_its_chunks_and_together_all(described):
    for place, owner in ((0, 0), (9, 1), (19, 2)):
        data = bytearray(range(20))
        data[place] ^= 128
        (described / "a").write_bytes(data)
        found = [manifest.find_damages(str(described), share, 3) for share in range(3)]
        assert [share for share in range(3) if found[share]] == [owner]
        assert found[owner] == [f"a differs from its checksum in bytes {owner * 8} to {min(20, owner * 8 + 8)}"]
        assert manifest.find_damages(str(described), shares=0) == []


def test_a_manifest_that_was_changed_says_so(described):
    text = (described / "manifest.json").read_text()
    (described / "manifest.json").write_text(text.replace('"bytes": 20', '"bytes": 21'))
    assert "its own checksum" in manifest.find_damages(str(described))[0]


def test_a_crash_between_two_names_loses_nothing(tmp_path):
    """The former checkpoint of the same step has lost its name, and the new one has not got it yet."""
    former = tmp_path / "_tmp-former-checkpoint-2"
    former.mkdir()
    (former / "trainer_state.json").write_text("{}")
    put_back_former(str(tmp_path))
    assert list_whole_checkpoints(str(tmp_path)) == [str(tmp_path / "checkpoint-2")]
    former.mkdir()
    put_back_former(str(tmp_path))  # the new one has its name: the former is rubbish
    assert former.exists()


def test_what_is_deleted_loses_its_name_first(tmp_path, monkeypatch):
    (tmp_path / "checkpoint-1").mkdir()
    monkeypatch.setattr(folder.shutil, "rmtree", lambda path, **kwargs: None)  # a crash in the middle
    remove(str(tmp_path / "checkpoint-1"))
    assert os.listdir(tmp_path) == ["_tmp-checkpoint-1"]


def test_what_lacks_a_file_is_no_candidate(tmp_path):
    """Seen without reading the files; neither is a layout's folder that has no manifest."""
    for step in (1, 2, 3):
        place = tmp_path / f"checkpoint-{step}"
        place.mkdir()
        for name in ("trainer_state.json", "hf_parallel.json", "model.safetensors"):
            (place / name).write_text("{}")
        manifest.write_manifest(str(place), {})
    (tmp_path / "checkpoint-3" / "manifest.json").unlink()
    (tmp_path / "checkpoint-2" / "model.safetensors").write_text("{")
    assert list_whole_checkpoints(str(tmp_path)) == [str(tmp_path / "checkpoint-1")]
