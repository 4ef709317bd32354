"""Manifests in chunks, folders that a crash has left between two names, and deletion."""

import os

import pytest

from hf_parallel.checkpoint import candidates, folder, manifest, put_back_former, remove


@pytest.fixture
def described(tmp_path, monkeypatch):
    """A folder of two files in chunks of eight bytes, and its manifest."""
    monkeypatch.setattr(manifest, "CHUNK", 8)
    (tmp_path / "sub").mkdir()
    (tmp_path / "a").write_bytes(bytes(range(20)))
    (tmp_path / "sub" / "b").write_bytes(b"")
    sums = manifest.Checksums()
    for piece in (bytes(range(3)), bytes(range(3, 19)), bytes([19])):  # as they are written
        sums.update(piece)
    manifest.write_manifest(str(tmp_path), {str(tmp_path / "a"): sums})
    return tmp_path


def test_chunks_are_those_of_the_file_however_it_was_written(described):
    assert manifest.damages(str(described)) == []
    read = manifest._read(str(described / "a"))
    assert (read.size, len(read.chunks)) == (20, 3)


def test_each_rank_reads_its_chunks_and_together_all(described):
    for place, owner in ((0, 0), (9, 1), (19, 2)):
        data = bytearray(range(20))
        data[place] ^= 128
        (described / "a").write_bytes(data)
        found = [manifest.damages(str(described), share, 3) for share in range(3)]
        assert [share for share in range(3) if found[share]] == [owner]
        assert found[owner] == [f"a differs from its checksum in bytes {owner * 8} to {min(20, owner * 8 + 8)}"]
        assert manifest.damages(str(described), shares=0) == []


def test_a_manifest_that_was_changed_says_so(described):
    text = (described / "manifest.json").read_text()
    (described / "manifest.json").write_text(text.replace('"bytes": 20', '"bytes": 21'))
    assert "its own checksum" in manifest.damages(str(described))[0]


def test_a_crash_between_two_names_loses_nothing(tmp_path):
    """The former checkpoint of the same step has lost its name, and the new one has not got it yet."""
    former = tmp_path / "_tmp-former-checkpoint-2"
    former.mkdir()
    (former / "trainer_state.json").write_text("{}")
    put_back_former(str(tmp_path))
    assert candidates(str(tmp_path)) == [str(tmp_path / "checkpoint-2")]
    former.mkdir()
    put_back_former(str(tmp_path))  # the new one has its name: the former is rubbish
    assert former.exists()


def test_what_is_deleted_loses_its_name_first(tmp_path, monkeypatch):
    (tmp_path / "checkpoint-1").mkdir()
    monkeypatch.setattr(folder.shutil, "rmtree", lambda path, **kwargs: None)  # a crash in the middle
    remove(str(tmp_path / "checkpoint-1"))
    assert os.listdir(tmp_path) == ["_tmp-checkpoint-1"]
