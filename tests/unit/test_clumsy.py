"""What is mistyped is told in one line that helps, once for all ranks."""

import atexit
import io
import os
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from hf_parallel import __main__ as runner
from hf_parallel import cli
from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.planner.hardware import make_cluster
from hf_parallel.planner.search import search

LLAMA = Path(__file__).parents[2] / "configs" / "models" / "llama-3.1-8b.json"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("TP=2", "TP: unknown key; did you mean tp?"),
        ("--tp=2", "--tp: unknown key; did you mean tp?"),
        ("tensor_parallel=2", "tensor_parallel: unknown key; did you mean tp?"),
        ("dp=2", "dp: unknown key; did you mean dp_shard?"),
        ("tp=2;pp=2", "tp_size=2;pp=2: a comma separates keys; tp_size=2,pp=2 works"),
        ("tp=2 pp=2", "tp_size=2 pp=2: a comma separates keys; tp_size=2,pp=2 works"),
        ("tp=2.5", "tp_size=2.5: not a whole number; tp_size=1 works"),
        ("async_save=yes", "async_save=yes: neither true nor false; async_save=false works"),
        (" ", "' ': holds no key=value; tp=2 works"),
        (",", "',': holds no key=value; tp=2 works"),
    ],
)
def test_mistyped_specs(spec, said):
    with pytest.raises(SpecError) as caught:
        ParallelConfig.parse(spec)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe\x00", "not a YAML file ('utf-8'"),
        (b"", "holds nothing; a line such as `tp_size: 2` works"),
        (b"tp: 2\n pp: 2", "not a YAML file (line 2: mapping values are not allowed here)"),
    ],
)
def test_mistyped_files(tmp_path, content, said):
    file = tmp_path / "spec.yaml"
    file.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        ParallelConfig.parse(str(file))
    assert str(caught.value).startswith(f"{file}: {said}")


def test_a_file_that_begins_with_a_mark(tmp_path):
    """As editors of Windows write it."""
    file = tmp_path / "spec.yaml"
    file.write_bytes(b"\xef\xbb\xbftp: 2\n")
    assert ParallelConfig.parse(str(file)).tp_size == 2


@pytest.mark.parametrize(
    ("spec", "world", "said"),
    [
        ("tp=2", 1, "tp=2 does not fit 1 process; start 2 processes (torchrun --nproc-per-node 2, "),
        ("dp_shard=1", 4, "one process, but 4 processes run; dp_shard=4 works"),
        ("tp=3", 4, "tp=3 does not fit 4 processes; start 3 processes"),
        ("tp=2,pp=4", 4, "pp=4 x tp=2 = 8 does not fit 4 processes; start 8 processes"),
    ],
)
def test_sizes(spec, world, said):
    with pytest.raises(SpecError) as caught:
        ParallelConfig.parse(spec).resolve(world)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("plan LLAMA --gpus 8 --gpu h100-80gb --optimizer lion", "optimizer=lion: not one of adamw, adamw_8bit"),
        ("plan LLAMA --gpus 8 --gpu h100-80gb --rows 0", "--rows 0: is more than 0"),
        ("plan LLAMA --gpus 8 --gpu h100-80gb --memory -1", "--memory -1: is more than 0"),
        ("plan LLAMA --gpus 8 --gpu h100-80gb --gpus-per-node 0", "--gpus-per-node 0: is more than 0"),
        ("doctor nowhere --parallel tp=2", "nowhere: not on this machine, and "),
        ("check --backend mpi", "--backend mpi: not one of nccl, gloo; --backend gloo works"),
        ("check --payload 0", "--payload 0: is more than 0 MiB; --payload 64 works"),
        ("check --json nowhere/check.json", "--json nowhere/check.json: "),
        ("recipe list --gpus 3 --method lora", "--gpus 3 --method lora: no recipe of this package"),
        ("migrate nowhere/fsdp.yaml", "nowhere/fsdp.yaml: no such file; give a YAML, JSON or Python file"),
        ("export nowhere/checkpoint-20 out", "nowhere/checkpoint-20: no such folder; give a checkpoint-N"),
        ("lunch train.py", "lunch: no such command; did you mean launch?"),
        ("train.py --output_dir out", "train.py: no such command; did you mean launch?"),
        ("launch --nproc 2 --parallel tp=2 train.py", "--nproc: no option of launch; --num_processes N works"),
        ("launch --gpus=2 train.py", "--gpus: no option of launch; --num_processes N works"),
        (
            "recipe show qwen3-0.6b-ful-1x24gb",
            "qwen3-0.6b-ful-1x24gb: no recipe of that name; did you mean qwen3",
        ),
    ],
)
def test_mistyped_commands(capsys, command, said):
    words = command.replace("LLAMA", str(LLAMA)).split()
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"hf_parallel: {said}")
    assert len(err.splitlines()) == 1


def test_a_launch_that_is_mistyped_is_told_in_two_lines(capsys):
    """Not in a page of options."""
    with pytest.raises(SystemExit):
        cli.main(["launch", "--num_processes", "two", "--parallel", "tp=2", "train.py"])
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 2
    assert "invalid int value: 'two'" in err[1]


def test_nodes_that_are_not_full():
    """What is said of usual layouts leaves out those that such machines cannot have."""
    cluster = make_cluster("h100-80gb", 12, 8, None)
    found = search(model=AutoConfig.from_pretrained(LLAMA), cluster=cluster, seq=512, global_batch=12, top=1)
    assert found.best is not None
    assert found.best.config.to_spec() == "dp_shard=12,zero_stage=2"
    told = [name.partition(" (")[0] for name, _ in found.why_not]
    assert told == ["plain data parallelism", "ZeRO-3 over all GPUs", "tensor parallelism across nodes"]


@pytest.mark.parametrize("missing", [True, False])
def test_completion_says_what_it_needs(monkeypatch, capsys, missing):
    if missing:
        monkeypatch.setitem(sys.modules, "shtab", None)
    else:
        pytest.importorskip("shtab")
    with pytest.raises(SystemExit) as ended:
        cli.main(["--print-completion", "bash"])
    assert ended.value.code == (2 if missing else 0)
    assert ("pip install 'hf-parallel[completion]'" in capsys.readouterr().err) == missing


def test_letters_that_a_terminal_does_not_have(monkeypatch):
    """Tables have signs that not every encoding has."""
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    assert cli.main(["doctor", str(LLAMA), "--parallel", "tp=2,dp_shard=1"]) == 0
    shown.flush()
    assert b"q_proj ?32" in shown.buffer.getvalue()


#: What a script does on its rank -> what ranks 0 and 1 say of it, from the first to the last line; and the exit code.
ENDS = {
    "raise ValueError('both')": (
        ("hf_parallel: rank 0 failed", "ValueError: both"),
        ("hf_parallel: rank 1 failed, too: ValueError: both",) * 2,
        1,
    ),
    "raise ValueError(RANK)": (
        ("hf_parallel: rank 0 failed", "ValueError: 0"),
        ("hf_parallel: rank 1 failed", "ValueError: 1"),
        1,
    ),
    "raise CheckpointError('not written')": (("hf_parallel: not written",) * 2, ("", ""), 1),
    "raise DamagedCheckpoint('damaged')": (("hf_parallel: damaged",) * 2, ("", ""), 2),
    "raise KeyboardInterrupt": (("Traceback (most recent call last):", "KeyboardInterrupt"), ("", ""), -2),
}


def ended(folder: Path) -> list[tuple[int, str]]:
    """Exit code of this rank under the runner and what it said, for each end."""
    found = []
    for number in range(len(ENDS)):
        err = folder / f"{number}.{os.environ['RANK']}"
        child = os.fork()
        if not child:
            try:
                os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + number)
                sys.stderr = open(err, "w")  # noqa: SIM115
                atexit._clear()  # pytest's
                runner.main(["--parallel", "dp_shard=-1", str(folder / f"{number}.py")])
            finally:
                os._exit(99)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found.append((code, err.read_text()))
    return found
