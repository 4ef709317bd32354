"""`hf-parallel launch`: which processes accelerate is told to start, and what is refused before it starts any."""

import os
from pathlib import Path

import pytest
from accelerate.commands import launch as accelerate_launch
from accelerate.commands.config import config_args
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from hf_parallel import cli
from hf_parallel.cli import launch as cli_launch
from tests.refusals import find_line


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """The namespaces that accelerate's `launch_command` receives, on a machine without accelerators or config."""
    calls = []
    monkeypatch.setattr(accelerate_launch, "launch_command", calls.append)
    monkeypatch.setattr(config_args, "default_config_file", str(tmp_path / "none.yaml"))
    monkeypatch.setattr(cli_launch, "count_accelerators", lambda: 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("from transformers import Trainer")
    monkeypatch.setattr(os, "environ", os.environ.copy())  # `launch` sets variables for the ranks
    for name in ("HF_PARALLEL", "OMP_NUM_THREADS", "ACCELERATE_USE_CPU"):
        os.environ.pop(name, None)
    return calls


def config_file(folder, **changes):
    """An accelerate config as `accelerate config` writes it."""
    values = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_processes": 4} | changes
    path = folder / "accelerate.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in values.items()))
    return str(path)


def refused(capsys, *argv):
    """The one line that a launch which must not start anything prints."""
    assert cli.main(["launch", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert err.startswith("hf_parallel: ")
    return err


def test_runner_is_filled_in(launched):
    argv = ["--num_processes", "4", "--parallel", "tp=2,pp=2", "train.py", "--lr", "1", "--parallel", "own", "-m"]
    assert cli.main(["launch", *argv]) == 0
    (args,) = launched
    assert (args.module, args.training_script) == (True, "hf_parallel")
    assert args.training_script_args == ["--parallel", "tp=2,pp=2", *argv[4:]]
    assert (args.multi_gpu, args.cpu, args.num_processes, args.num_machines) == (True, False, 4, 1)
    assert args.num_cpu_threads_per_process == 1
    assert args.main_process_port == 0


def test_module_scripts(launched):
    assert cli.main(["launch", "--num-processes=2", "--parallel=tp=2", "-m", "pkg.train", "--lr", "1"]) == 0
    assert launched[0].training_script_args == ["--parallel", "tp=2", "-m", "pkg.train", "--lr", "1"]
    assert (launched[0].module, launched[0].training_script) == (True, "hf_parallel")


def test_environment_spec_is_checked_and_left_to_the_ranks(launched, capsys):
    os.environ["HF_PARALLEL"] = "tp=2"
    assert cli.main(["launch", "--num_processes", "2", "train.py"]) == 0
    assert launched[0].training_script_args == ["train.py"]
    assert "tp=2" in refused(capsys, "--num_processes", "3", "train.py")
    line = refused(capsys, "--num_processes", "2", "--parallel", "pp=2", "train.py")
    assert "HF_PARALLEL" in line
    assert "--parallel" in line


def test_auto_is_left_to_the_ranks(launched, capsys):
    assert cli.main(["launch", "--num_processes", "3", "--parallel", "auto", "train.py"]) == 0
    assert launched[0].training_script_args == ["--parallel", "auto", "train.py"]
    os.environ["HF_PARALLEL"] = "tp=3"
    assert "HF_PARALLEL is tp=3" in refused(capsys, "--num_processes", "3", "--parallel", "auto", "train.py")


def test_without_a_spec_a_layout_is_chosen(launched, capsys):
    assert cli.main(["launch", "--num_processes", "2", "train.py", "--lr", "1"]) == 0
    assert launched[0].training_script_args == ["--parallel", "auto", "train.py", "--lr", "1"]
    assert launched[0].multi_gpu
    assert capsys.readouterr().err == ""  # the ranks say what they have chosen


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["train.py"], "one device"),
        (["--num_processes", "2", "--use_fsdp", "train.py"], "--use_fsdp"),
        (["--num_processes", "2", "train.py", "--deepspeed=zero.json"], "--deepspeed"),
        (["--num_processes", "2", "plain.py"], "plain.py"),
        (["--num_processes", "2", "train.py", "--parallel", "tp=2"], None),
        (["--num_processes", "2", "own.py"], None),
    ],
)
def test_a_script_that_runs_plainly_is_told_in_a_line(launched, capsys, argv, reason):
    """But for one that names its layout itself."""
    Path("plain.py").write_text("import torch")
    Path("own.py").write_text("import hf_parallel, transformers")
    assert cli.main(["launch", *argv]) == 0
    own, script = cli_launch.split_words(argv)
    assert launched[0].training_script_args == script
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (reason is not None)
    assert reason is None or reason in lines[0]


def test_another_way_of_a_config_file_stays(launched, tmp_path):
    path = config_file(tmp_path, distributed_type="FSDP")
    assert cli.main(["launch", "--config_file", path, "train.py"]) == 0
    assert launched[0].training_script_args == ["train.py"]
    assert not launched[0].multi_gpu


def test_cpu_on_a_machine_with_gpus(launched, monkeypatch):
    monkeypatch.setattr(cli_launch, "count_accelerators", lambda: 8)
    assert cli.main(["launch", "--cpu", "--num_processes", "2", "--parallel", "tp=2", "train.py"]) == 0
    assert (launched[0].multi_gpu, launched[0].cpu) == (True, False)
    assert (os.environ["ACCELERATE_USE_CPU"], os.environ["CUDA_VISIBLE_DEVICES"]) == ("true", "")


def test_gpus_decide_the_number_of_processes_and_threads_are_left_to_accelerate(launched, monkeypatch):
    monkeypatch.setattr(cli_launch, "count_accelerators", lambda: 8)
    assert cli.main(["launch", "--parallel", "tp=2", "train.py"]) == 0
    assert (launched[0].num_processes, launched[0].num_cpu_threads_per_process) == (8, None)
    assert "ACCELERATE_USE_CPU" not in os.environ


def test_threads_given_by_the_user_stay(launched):
    os.environ["OMP_NUM_THREADS"] = "3"
    assert cli.main(["launch", "--num_processes", "2", "train.py"]) == 0
    assert launched[0].num_cpu_threads_per_process is None


@pytest.mark.parametrize("kind", ["MULTI_GPU", "MULTI_CPU", "'NO'"])
def test_config_file(launched, tmp_path, kind):
    path = config_file(tmp_path, distributed_type=kind, num_processes=4, main_process_port=29512)
    assert cli.main(["launch", "--config_file", path, "--parallel", "tp=4", "train.py"]) == 0
    assert (launched[0].multi_gpu, launched[0].num_processes) == (True, 4)
    assert launched[0].main_process_port is None  # accelerate takes the file's


def test_several_machines(launched, capsys):
    machines = ["--num_machines", "2", "--num_processes", "4", "--parallel", "dp_replicate=2,tp=2"]
    where = ["--machine_rank", "1", "--main_process_ip", "10.0.0.1", "--main_process_port", "29500"]
    assert cli.main(["launch", *machines, *where, "train.py"]) == 0
    assert (launched[0].num_machines, launched[0].machine_rank, launched[0].main_process_port) == (2, 1, 29500)
    assert "--machine_rank" in refused(capsys, *machines, "train.py")
    assert "--num_processes 2 works" in refused(capsys, "--num_machines", "2", "--num_processes", "3", "train.py")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--num_processes", "4", "--parallel", "tpp=2", "train.py"], ["tpp", "tp"]),
        (["--num_processes", "4", "--parallel", "tp=3", "train.py"], ["tp=3", "4 processes"]),
        (["--parallel", "tp=2", "train.py"], ["tp=2", "1 process"]),
        (["--num_processes", "2", "--use_fsdp", "--parallel", "tp=2", "train.py"], ["--use_fsdp", "dp_shard"]),
        (["--num_processes", "2", "--no_python", "--parallel", "tp=2", "train.sh"], ["--no_python"]),
        (["--config_file", "missing.yaml", "--parallel", "tp=2", "train.py"], ["--config_file", "missing.yaml"]),
    ],
)
def test_refusals(launched, capsys, argv, words):
    line = refused(capsys, *argv)
    assert all(word in line for word in words), line
    assert launched == []


def test_other_ways_to_distribute_in_the_config_file(launched, tmp_path, capsys):
    path = config_file(tmp_path, distributed_type="FSDP")
    assert "FSDP" in refused(capsys, "--config_file", path, "--parallel", "tp=2", "train.py")
    path = config_file(tmp_path, parallelism_config="{parallelism_config_tp_size: 2}")
    assert "parallelism_config" in refused(capsys, "--config_file", path, "--parallel", "tp=2", "train.py")
    path = config_file(tmp_path, unheard_of=1)
    assert "unheard_of" in refused(capsys, "--config_file", path, "--parallel", "tp=2", "train.py")


@pytest.mark.parametrize(
    ("ended", "code", "words"),
    [(1, 1, "rank 3 ended with exit code 1"), (-9, 137, "rank 3 was killed by SIGKILL"), (2, 2, "")],
)
def test_the_rank_that_ended_first_is_named(launched, monkeypatch, capsys, ended, code, words):
    def fail(args):
        raise ChildFailedError("hf_parallel", {3: ProcessFailure(3, 1, ended, "")})

    monkeypatch.setattr(accelerate_launch, "launch_command", fail)
    assert cli.main(["launch", "--num_processes", "4", "train.py"]) == code
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == bool(words)


def test_help_version_and_unknown_commands(capsys):
    for argv, code, words in (
        (["--help"], 0, "launch"),
        (["--version"], 0, "hf-parallel 0."),
        (["plan", "--help"], 0, "--timeline FILE"),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(argv)
        assert stop.value.code == code
        assert words in "".join(capsys.readouterr())
    assert cli.main(["plan"]) == 2
    assert "needs a MODEL; or --timeline" in capsys.readouterr().err
    assert cli.main(["fly"]) == 2
    assert find_line(capsys.readouterr().err, "fly", "launch", "doctor", "plan")
    assert cli.main([]) == 2
    assert "launch" in capsys.readouterr().err


def test_the_help_of_launch_is_a_screen(capsys, monkeypatch):
    """50 lines of 80 characters, with the option that shows everything."""
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["launch", "--help"]) == 0
    page = capsys.readouterr().out
    assert len(page.splitlines()) <= 50
    assert [line for line in page.splitlines() if len(line) > 80] == []
    assert page.index("--parallel SPEC") < page.index("--num_processes") < page.index("--help-accelerate")
    assert cli.main(["launch", "--help-accelerate"]) == 0
    assert "--fsdp_version" in capsys.readouterr().out


def test_options_of_the_short_page_are_those_of_the_launcher():
    full = cli_launch.make_full_parser()._option_string_actions
    short = cli_launch.make_short_parser()._option_string_actions
    assert {name for name in short if name not in full} == {"--help-accelerate"}
    assert {name for name in short if getattr(short[name], "nargs", None) == 0} - {"-h", "--help"} <= {
        name for name in full if full[name].nargs == 0
    } | {"--help-accelerate"}
