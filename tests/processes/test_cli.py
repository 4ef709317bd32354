"""Commands of `hf-parallel` started as processes: quick help, typing mistakes, the report of the rank that failed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def command(*argv, cwd=ROOT, **environment):
    """Run `hf-parallel` in an interpreter of its own."""
    code = "import sys; sys.argv[0] = 'hf-parallel'; from hf_parallel import cli; sys.exit(cli.main())"
    kept = {name: value for name, value in os.environ.items() if name not in ("HF_PARALLEL", "OMP_NUM_THREADS")}
    kept |= {"PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, "-c", code, *argv], cwd=cwd, env=kept, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["launch", "--num-processes", "3", "--parallel", "tp=2", "train.py"], ["tp=2", "3 processes"]),
        (["launch", "--parallel", "shrad=2", "train.py"], ["shrad", "did you mean dp_shard?"]),
        (["launch", "--parallel", "t=2", "train.py"], ["t: unknown", "did you mean tp?"]),
        (["launch", "--parallel", "spec.yml", "train.py"], ["spec.yml", "did you mean spec.yaml?"]),
        (["launch", "trian.py"], ["trian.py", "did you mean train.py?"]),
        (["launch", "--config_file", "acelerate.yaml", "train.py"], ["did you mean accelerate.yaml?"]),
        (["plan", "./model", "--gpus", "8", "--gpu", "h10"], ["h10", "did you mean", "h100-80gb"]),
        (["plan", "./modle", "--gpus", "8", "--gpu", "h100-80gb"], ["./modle", "did you mean ./model?"]),
        (["doctor", "./modle", "--parallel", "tp=2"], ["./modle", "did you mean ./model?"]),
    ],
)
def test_a_typing_mistake_is_told_before_torch_is_imported(tmp_path, argv, words):
    """With what may have been meant."""
    for name in ("train.py", "spec.yaml", "accelerate.yaml"):
        (tmp_path / name).write_text("")
    (tmp_path / "model").mkdir()
    code = f"""
import sys
from hf_parallel import cli
assert cli.main({argv!r}) == 2
assert not {{"torch", "transformers", "accelerate"}} & {{*sys.modules}}
"""
    known = {name: value for name, value in os.environ.items() if name != "HF_PARALLEL"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=known, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [word for word in words if word not in done.stderr] == []
    assert len(done.stderr.splitlines()) == 1


def test_help_is_quick():
    code = (
        "import sys; sys.argv = ['hf-parallel', '--help']\n"
        "from hf_parallel import cli\n"
        "slow = {'torch', 'transformers', 'accelerate', 'ssl'}\n"
        "try: cli.main()\n"
        "except SystemExit: print(sorted(slow & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done


def test_two_processes_start_without_gpus(tmp_path):
    names = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    (tmp_path / "train.py").write_text(f"import os; print([os.environ[n] for n in {names}], flush=True)")
    done = command("launch", "--num_processes", "2", "train.py", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert "['0', '2', '1']" in done.stdout
    assert "['1', '2', '1']" in done.stdout


def test_the_failing_ranks_report_is_what_one_reads(tmp_path):
    (tmp_path / "train.py").write_text("import os\nif os.environ['RANK'] == '1': raise ValueError('here')\n")
    done = command("launch", "--num_processes", "2", "train.py", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[1] == "hf_parallel: rank 1 failed"
    assert lines[-2:] == ["ValueError: here", "hf_parallel: rank 1 ended with exit code 1; all ranks ended"]
