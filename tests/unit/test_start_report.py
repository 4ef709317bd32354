"""The facts of a run that a full disk does not take: one line, and training goes on."""

from hf_parallel.hooks import report


def test_a_folder_that_takes_no_file(tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    report._write({"spec": "tp=2"}, str(tmp_path / "taken"))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "cannot write" in lines[0]
    assert "training goes on without it" in lines[0]
