"""`python -m hf_parallel`: what the script sees, what is left alone, and how every rank ends."""

import atexit
import gzip
import logging
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch.distributed as dist

from hf_parallel import __main__ as runner
from hf_parallel.cli import runner as output
from tests.distributed import run

ROOT = Path(__file__).parents[2]
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HF_PARALLEL")


@pytest.fixture
def script(tmp_path):
    """`script(code)` writes a script and returns its path."""

    def write(code, name="train.py"):
        path = tmp_path / "scripts" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(code))
        return path

    return write


def finish(*arguments, cwd, rank=None, world_size=1, **environment):
    """Run `python -m hf_parallel …` as one rank to the end: (exit code, stdout, stderr)."""
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    kept |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
    if rank is not None:
        kept |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        kept |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, "-m", "hf_parallel", *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=kept, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def ended(cwd: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and stderr of this rank under the runner, forked instead of started: torch is there already.

    What it has to say goes to the files `out-RANK` and `err-RANK`.
    """
    out, err = (cwd / f"{name}-{os.environ['RANK']}" for name in ("out", "err"))
    child = os.fork()
    if not child:
        try:
            os.chdir(cwd)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.stdout, sys.stderr = open(out, "w"), open(err, "w")  # noqa: SIM115
            atexit._clear()  # pytest's
            atexit.register(logging.shutdown)
            atexit.register(lambda: Path("group").write_text(str(dist.is_initialized())))
            runner.main(list(arguments))
        except SystemExit as stop:  # of one process, which has nobody to wait for
            sys.stderr.flush()
            os._exit(stop.code)
        finally:
            os._exit(99)  # Python would take itself apart, with threads around
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), err.read_text()


def test_script_sees_what_plain_python_gives_it(script, tmp_path):
    train = script(
        """
        import sys, helper
        from pathlib import Path
        assert __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals()
        script = Path(__file__)
        print(sys.argv[1:], Path(sys.argv[0]).name, sys.path[0] == str(script.parent), script.is_absolute())
        """
    )
    script("", name="helper.py")
    code, out, err = finish("scripts/train.py", "--lr", "1", "-m", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert out.strip() == "['--lr', '1', '-m'] train.py True True"
    assert train.exists()


def test_module(script, tmp_path):
    script("import sys; print(__name__, sys.argv[1:])", name="tool.py")
    code, out, err = finish("-m", "tool", "--x", cwd=tmp_path / "scripts")
    assert (code, out.strip(), err) == (0, "__main__ ['--x']", "")


def test_without_a_spec_nothing_is_imported(script, tmp_path):
    script(
        "import sys; print([n for n in sys.modules if n.split('.')[0] in ('torch', 'transformers', 'hf_parallel')])"
    )
    assert finish("scripts/train.py", cwd=tmp_path)[1].strip() == "[]"


def test_without_a_spec_nothing_is_patched(script, tmp_path):
    """Before the script imports us, which gives it the field."""
    script(
        """
        import inspect, sys
        from accelerate import Accelerator
        from transformers import HfArgumentParser, PreTrainedModel, Trainer, TrainingArguments

        def bare(value):
            if isinstance(value, property):
                return value.fget
            return value.__func__ if isinstance(value, (classmethod, staticmethod)) else value

        def replaced():
            loaded = list(sys.modules.items())
            modules = [module for name, module in loaded if name.partition(".")[0] in ("transformers", "accelerate")]
            held = [value for module in modules for value in list(vars(module).values())]
            held += [bare(value) for owner in held if inspect.isclass(owner) for value in list(vars(owner).values())]
            functions = [value for value in held if inspect.isfunction(value)]
            assert len(functions) > 1000
            return {f.__qualname__ for f in functions if "hf_parallel/hooks" in f.__code__.co_filename}

        assert replaced() == set()
        assert not hasattr(TrainingArguments, "parallel")
        assert "--parallel " not in HfArgumentParser(TrainingArguments).format_help()
        assert not [name for name in sys.modules if name.startswith("hf_parallel")]
        import hf_parallel
        assert "TrainingArguments.__post_init__" in replaced()
        assert TrainingArguments("out", parallel="dp_shard=-1", use_cpu=True).parallel == "dp_shard=-1"
        """
    )
    code, _, err = finish("scripts/train.py", "--output_dir", "x", cwd=tmp_path)
    assert code == 0, err


def test_the_scripts_own_flag_installs_the_field(script, tmp_path):
    script(
        """
        from transformers import HfArgumentParser, TrainingArguments
        (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
        print(args.parallel)
        """
    )
    code, out, err = finish("scripts/train.py", "--output_dir", "x", "--parallel=dp_shard=-1", cwd=tmp_path)
    assert (code, out.strip()) == (0, "dp_shard=-1"), err
    ((code, err),) = run(ended, 1, tmp_path, "scripts/train.py", "--output_dir", "x", "--parallel", "tp=3", init=False)
    assert code == 2
    assert [line for line in err.splitlines() if "tp=3" in line] == [err.strip().splitlines()[-1]]


@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(7)", 7), ("sys.exit()", 0), ("raise KeyboardInterrupt", -2), ("sys.exit('no')", 1)]
)
def test_exit_codes_pass_through(script, tmp_path, end, code):
    script(f"import sys; {end}")
    assert finish("scripts/train.py", cwd=tmp_path)[0] == code


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["--parallel", "tpp=2", "scripts/train.py"], {}, ["tpp", "tp"]),
        (["--parallel", "tp=3", "scripts/train.py"], {}, ["tp=3", "1 process"]),
        (["--parallel", "tp=2", "scripts/train.py"], {"HF_PARALLEL": "pp=2"}, ["--parallel", "HF_PARALLEL", "pp=2"]),
        (["scripts/train.py"], {"HF_PARALLEL": "tp"}, ["tp", "key=value"]),
        (["scripts/missing.py"], {}, ["missing.py", "no such script"]),
        (["plan", "--gpus", "2"], {}, ["plan: no such script", "hf-parallel plan"]),
        (["--spec", "tp=2", "scripts/train.py"], {}, ["--spec", "unknown option"]),
        (["--parallel", "tp=2"], {}, ["no script"]),
        ([], {}, ["no script", "usage"]),
    ],
)
def test_refusals_are_one_line(script, tmp_path, arguments, environment, words):
    script("print('ran')")
    code, out, err = finish(*arguments, cwd=tmp_path, rank=0, **environment)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1, err
    assert err.startswith("hf_parallel: ")
    assert all(word in err for word in words), err


def test_only_rank_0_speaks(script, tmp_path):
    script("")
    (code, first), (other, second) = run(ended, 2, tmp_path, "--parallel", "tpp=2", "scripts/train.py", init=False)
    assert (code, other) == (2, 2)
    assert (len(first.splitlines()), len(second.splitlines())) == (1, 0)


@pytest.mark.parametrize(
    ("command", "given", "again"),
    [
        (["-u", "-m", "hf_parallel", "train.py"], {}, True),
        (["-m", "hf_parallel", "-m", "train"], {"PYTHONHASHSEED": "random"}, False),
        (["-c", "from multiprocessing.spawn import spawn_main; spawn_main(7)"], {}, False),
        (["-m", "debugger", "-m", "hf_parallel"], {}, False),
        (["train.py"], {}, False),
    ],
)
def test_ranks_hash_alike(monkeypatch, command, given, again):
    """The command is started anew as it is, once, if it is the runner's own and nobody has chosen a seed."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    started = []
    monkeypatch.setattr(sys, "orig_argv", ["python", *command])
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given))
    output.order_sets_alike()
    assert [(words[1:], environment["PYTHONHASHSEED"]) for _, words, environment in started] == [
        (command, "0")
    ] * again


def test_sets_have_one_order(script, tmp_path):
    """Labels that a script takes from a set are numbered alike on all ranks."""
    train = script("print('labels', list({'person', 'place', 'date', 'award', 'city', 'name', 'time'}))")
    environment = {name: value for name, value in os.environ.items() if name not in (*LAUNCHER, "PYTHONHASHSEED")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "hf_parallel", "--parallel", "dp_shard=2", str(train)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    one, other = [line for line in done.stdout.splitlines() if line.startswith("labels")]
    assert one == other


def test_equal_specs_from_two_sources_agree(monkeypatch):
    monkeypatch.setenv("HF_PARALLEL", "tp_size=2")
    assert runner.choose_spec("tp=2") == ("tp=2", "the runner's --parallel")
    assert runner.choose_spec(None) == ("tp_size=2", "HF_PARALLEL")
    monkeypatch.setenv("HF_PARALLEL", "")
    assert runner.choose_spec(None) is None


def test_command_line():
    command = runner.parse_command(["--parallel=tp=2", "train.py", "--parallel", "x", "-m"])
    assert command == runner.Command("tp=2", False, "train.py", ["--parallel", "x", "-m"])
    assert runner.parse_command(["--parallel", "a", "-m", "pkg.train", "b"]) == runner.Command(
        "a", True, "pkg.train", ["b"]
    )
    with pytest.raises(SystemExit):
        runner.parse_command(["--help"])


FAILING = """
    import os
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ones = torch.ones(2)
    dist.all_reduce(ones)
    if dist.get_rank() == 1:
        {end}
    dist.all_reduce(ones)
    """


@pytest.mark.parametrize("end", ["raise ValueError('the real reason')", "os.kill(os.getpid(), 9)"])
def test_a_failing_rank_reports_and_its_peers_end(script, tmp_path, end):
    script(FAILING.format(end=end))
    (code, peer), (code_of_failed, failed) = run(ended, 2, tmp_path, "scripts/train.py", init=False)
    assert (code, code_of_failed) == (1, 1 if "ValueError" in end else -9)
    assert "hf_parallel: rank 0 lost its peers (" in peer.splitlines()[-1]
    assert "Traceback" not in peer
    if "ValueError" in end:
        assert "hf_parallel: rank 1 failed" in failed
        assert "ValueError: the real reason" in failed.splitlines()[-1]
        assert "runpy" not in failed


def test_a_refusal_of_one_rank_alone_is_not_lost(script, tmp_path):
    refuse = "from hf_parallel.ask.config import SpecError; raise SpecError('tp=3: only here')"
    script(FAILING.format(end=refuse))
    code, said = run(ended, 2, tmp_path, "scripts/train.py", init=False)[1]
    assert code == 2
    assert said.splitlines()[-1] == "hf_parallel: rank 1: tp=3: only here"


def test_an_own_error_is_not_taken_for_a_lost_peer(script, tmp_path):
    script("raise ConnectionError('Connection reset by peer')")
    code, _, err = finish("scripts/train.py", cwd=tmp_path)
    assert code == 1
    assert err.splitlines()[0] == "hf_parallel: rank 0 failed"
    assert err.splitlines()[1].startswith("Traceback")


def test_a_failing_rank_takes_its_workers_along(script, tmp_path):
    """They have its connections and its output, which would stay open."""
    code = """
        import multiprocessing, time
        multiprocessing.Process(target=time.sleep, args=(600,), daemon=True).start()
        raise ValueError("this one")
        """
    ended, _, err = finish(script(code), cwd=tmp_path, rank=1, world_size=2)  # which would not wait for it so long
    assert (ended, "ValueError: this one" in err) == (1, True)


ENDING = """
    import atexit, gzip, logging, logging.handlers, os, sys, threading, time
    import torch
    import torch.distributed as dist
    from transformers import Trainer

    held = dist.new_group()
    Trainer.held = held
    log = logging.getLogger("held_back")
    log.addHandler(logging.handlers.MemoryHandler(9, target=logging.FileHandler("log")))
    log.warning("logged")
    text, packed = open("text", "w"), gzip.open("packed", "wt")
    text.write("written")
    packed.write("packed")
    print("printed", end="")

    def late():
        time.sleep(0.3)
        open("thread", "w").write("joined")

    def at_exit():
        ones = torch.ones(3)
        dist.all_reduce(ones, group=held)
        open("exit", "w").write(f"{ones.sum().item():.0f} {os.path.exists('thread')}")

    threading.Thread(target=late).start()
    atexit.register(at_exit)
    {end}
    """


def ending(folder: Path, train: str) -> tuple[int, dict[str, str]]:
    """Exit code of this rank under the runner, and what it left."""
    folder = folder / os.environ["RANK"]
    folder.mkdir()
    code, _ = ended(folder, "--parallel", "dp_shard=-1", train)
    left = {path.name.partition("-")[0]: path.read_text() for path in folder.iterdir() if path.name != "packed"}
    return code, {**left, "packed": gzip.open(folder / "packed", "rt").read()}


@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        ("", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('no')", 1, "no\n"),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt\n"),
    ],
)
def test_everything_is_finished_when_a_rank_leaves(script, tmp_path, end, code, told):
    """Threads, exit callbacks (which still have the groups), open files; and Python does not take itself apart."""
    ends = run(ending, 2, tmp_path, str(script(ENDING.replace("{end}", end))), init=False)
    for rank, (found, left) in enumerate(ends):
        assert found == code, left["err"]
        wanted = {"out": "printed", "text": "written", "packed": "packed", "log": "logged\n"}
        if found >= 0:  # Ctrl-C waits for nothing
            wanted |= {"thread": "joined", "exit": "6 True"}
        assert {name: left.get(name) for name in wanted} == wanted
        assert left["err"].endswith(told if rank == 0 or found >= 0 else "")  # Ctrl-C has one traceback
        assert left["group"] == str(code != 0)  # what a rank that ends by an error has begun may never come to an end
