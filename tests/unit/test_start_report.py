"""What is said at the start: of a full disk one line, and of a script that counts processes another."""

import sys

from hf_parallel.hooks import after_import, report


def test_a_folder_that_takes_no_file(tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    report._write({"spec": "tp=2"}, str(tmp_path / "taken"))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "cannot write" in lines[0]
    assert "training goes on without it" in lines[0]


def test_a_script_that_counts_processes(tmp_path, monkeypatch):
    """Under tp=2,dp_shard=2 two of four processes read batches of their own."""
    path = tmp_path / "finetune.py"
    path.write_text("world_size = int(os.environ.get('WORLD_SIZE', 1))\nsteps = steps // world_size")
    monkeypatch.setattr(sys, "argv", [str(path)])
    (line,) = after_import.counted(4, 2)
    assert "finetune.py reads WORLD_SIZE: 4 processes, of which 2 read batches of their own; gradient_acc" in line
    assert after_import.counted(2, 2) == []
    path.write_text("args = TrainingArguments()")
    assert after_import.counted(4, 2) == []
