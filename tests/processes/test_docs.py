"""Every command of README and docs runs here on tiny stand-ins, unless tests/unit/test_docs.py names its test."""

import importlib
import importlib.util
import json
import os
import re
import runpy
import sys
from functools import cache, partial
from pathlib import Path

import pytest
import transformers
from accelerate.commands import launch as accelerate_launch
from accelerate.commands.config import config_args
from torch.distributed.run import get_args_parser as torchrun_parser

from hf_parallel import __main__ as runner
from hf_parallel import cli
from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.cli import launch as cli_launch
from tests import models
from tests.commands import ROOT, Shown
from tests.distributed import run, run_alone
from tests.unit.test_docs import ALL, elsewhere, quietly

SPEC = "tp=2,pp=2"


#: What keeps a benchmark within a second; its figures are the pages' own.
SHORT = {
    "benchmarks/monitor.py": ["--spec=tp=2", "--steps=1", "--hidden=32", "--length=8"],
    "benchmarks/planner.py": ["--rounds", "1"],
    "benchmarks/context.py": ["--length=64", "--steps=1", "--limit=4000"],
    "benchmarks/pipeline.py": ["--ranks=2", "--micro-batches=2", "--milliseconds=1", "--steps=1", "--schedules=1f1b"],
}


SCRIPT = """
import sys
from transformers import HfArgumentParser, TrainingArguments
HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--output_dir", "out", *sys.argv[1:]])
"""


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with everything that the pages take for granted, under the names they use."""
    root = tmp_path_factory.mktemp("docs")
    (root / "train.py").write_text(SCRIPT)
    (root / "script.py").write_text(SCRIPT)
    for name in ("configs", "integrations", "benchmarks"):
        (root / name).symlink_to(ROOT / name)
    (root / "out").mkdir()
    (root / "out" / "hf_parallel.json").write_text('{"spec": "tp=2,pp=2,dp_shard=1"}')
    (root / "OUT").mkdir()
    logged = [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.0}]
    (root / "OUT" / "trainer_state.json").write_text(json.dumps({"global_step": 2, "log_history": logged}))
    (root / "docs" / "images").mkdir(parents=True)
    (root / "ROWS.json").symlink_to(ROOT / "tests" / "planner" / "data" / "published.json")
    run_alone(partial(write_checkpoints, root))
    return root


def write_checkpoints(root: Path) -> None:
    """A model with its weights, a checkpoint of it, an adapter for it."""
    import peft

    model = models.build("llama", architectures=["LlamaForCausalLM"])
    model.save_pretrained(root / "MODEL")
    model.save_pretrained(root / "out" / "checkpoint-20")
    model = transformers.AutoModelForCausalLM.from_pretrained(root / "MODEL")
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(root / "adapter")


@pytest.mark.parametrize("command", [item for item in ALL if elsewhere(item) is None], ids=lambda item: item.text)
def test_command(command, desk, monkeypatch):
    monkeypatch.chdir(desk)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    os.environ.pop("HF_PARALLEL", None)
    words = [stand_in(word, command.text) for word in command.words]
    while "=" in words[0]:
        name, value = words.pop(0).split("=", 1)
        os.environ[name] = value
    RUN[words[0]](words[1:])


def stand_in(word: str, text: str) -> str:
    """A tiny thing of the same kind for a placeholder or a model of the Hub."""
    if word in ("N", "NAME"):
        return {"N": "8", "NAME": "h100-80gb"}[word]
    if word == "out/checkpoint-20" and "--merge-adapter" in text:
        return "adapter"
    if re.fullmatch(r"[\w.-]+/[\w.-]*(Llama|Qwen)[\w.-]*", word):
        return "MODEL"
    return word.replace("SPEC", SPEC)


def run_hf_parallel(words: list[str]) -> None:
    """`launch` as far as accelerate's own launcher, which starts the runner; the others to their end."""
    if words[0] == "launch":
        return launched(words[1:])
    if len([word for word in words[1:] if not word.startswith("--")]) == 0:
        words = [*words, "--help"]  # only named
    code, text = run_alone(partial(quietly, partial(cli.main, words)))
    assert code == 0, text


def launched(words: list[str]) -> None:
    """What accelerate would start, on ranks that are forked instead."""
    if not any(word.endswith(".py") or word == "-m" for word in words):
        words = [*words, "train.py"]
    calls: list = []
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(accelerate_launch, "launch_command", calls.append)
        patches.setattr(config_args, "default_config_file", "none.yaml")
        patches.setattr(cli_launch, "count_accelerators", lambda: 0)
        assert cli.main(["launch", *words]) == 0
    assert (calls[0].module, calls[0].training_script) == (True, "hf_parallel")
    on_ranks(calls[0].num_processes, calls[0].training_script_args)


def run_torchrun(words: list[str]) -> None:
    options = torchrun_parser().parse_args(words)
    assert (options.module, options.training_script) == (True, "hf_parallel")
    on_ranks(int(options.nproc_per_node) * int(options.nnodes.partition(":")[2]), options.training_script_args)


def run_accelerate(words: list[str]) -> None:
    if words[0] != "launch":
        assert importlib.util.find_spec(f"accelerate.commands.{words[0].partition('-')[0]}"), words
        return
    options = accelerate_launch.launch_command_parser().parse_args(words[1:])
    config = config_args.load_config_from_file(options.config_file)
    assert (options.module, options.training_script) == (True, "hf_parallel")
    spec, *rest = options.training_script_args[1:]
    # The page's SPEC stands for any spec: here for one that fits the file's processes.
    on_ranks(config.num_processes, ["--parallel", "tp=2,pp=2,dp_shard=-1" if spec == SPEC else spec, *rest])


def run_python(words: list[str]) -> None:
    if words[:2] == ["-m", "hf_parallel"]:
        on_ranks(1, words[2:] or ["script.py"])
    elif words[:2] == ["-m", "tests.sweep"]:
        code, text = run_alone(
            partial(quietly, partial(program, "-m", "tests.sweep", "causal", "bloom", "--results", "r"))
        )
        assert (code, "tp=2 15: ok" in text) == (0, True), text
    elif words[0] == "-c":
        exec(words[1].replace("1e9", "0").replace("29400", "0"), {})
    else:
        # Without a seed a program that needs one replaces its process, this fork of pytest, by a new one.
        seeded = {"PYTHONHASHSEED": "0"}
        code, text = run_alone(partial(quietly, partial(program, *words, *SHORT.get(words[0], []))), env=seeded)
        assert code == 0 or (words[0] == "benchmarks/pipeline.py" and "OFF" in text), text  # a time on a busy machine


def program(*words: str) -> None:
    """`python WORDS`, in this process."""
    sys.path.insert(0, str(ROOT))
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    if words[0] == "train.py":
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")
        return
    module = importlib.import_module(words[0].removesuffix(".py").replace("/", "."))
    sys.argv = list(words)
    if words[0].endswith("advice.py"):
        module.CASES = module.CASES[:1]
    code = module.main()
    raise SystemExit(code)


def run_sbatch(words: list[str]) -> None:
    """The job script is what tests/processes/test_slurm_script.py runs; its words are the runner's."""
    at = next(index for index, word in enumerate(words) if word.endswith(".sbatch"))
    assert Path(words[at]).is_file()
    nodes = {name: int(value) for name, _, value in (word.partition("=") for word in words[:at])}.get("--nodes", 2)
    if words[at + 1 :]:
        tasks = int(re.search(r"--ntasks-per-node=(\d+)", Path(words[at]).read_text())[1])
        given = [word.replace(SPEC, f"{SPEC},dp_shard=-1") for word in words[at + 1 :]]
        on_ranks(nodes * tasks, given)


RUN = {
    "hf-parallel": run_hf_parallel,
    "torchrun": run_torchrun,
    "accelerate": run_accelerate,
    "python": run_python,
    "sbatch": run_sbatch,
}


def on_ranks(world: int, words: list[str]) -> None:
    """The runner on so many ranks has the layout; above four, and of TRL's scripts, only the words are read."""
    command = runner.parse_command(words)
    if command.target.startswith("trl."):
        known_to_trl(command)
    chosen = command.parallel or os.environ.get("HF_PARALLEL")
    spec = chosen or next((b for a, b in zip(words, words[1:], strict=False) if a == "--parallel"), None)
    expected = ParallelConfig.parse(spec).resolve(world) if spec and world > 1 else None
    if world <= 4 and not command.is_module:
        found = layouts(world, tuple(words), os.environ.get("HF_PARALLEL"))
        assert found == [expected] * world


@cache
def layouts(world: int, words: tuple[str, ...], variable: str | None) -> list:
    """The layout that a script finds on each rank."""
    environment = {"ACCELERATE_USE_CPU": "true", **({"HF_PARALLEL": variable} if variable else {})}
    call = partial(layout_in_script, list(words))
    return run(call, world, init=False, env=environment) if world > 1 else [run_alone(call, env=environment)]


def layout_in_script(words: list[str]) -> ParallelConfig | None:
    command = runner.parse_command(words)
    runner.prepare(command)
    runner.run(command)
    runtime = sys.modules.get("hf_parallel.hooks.runtime")
    return runtime.current().config if runtime and runtime.current() else None


def known_to_trl(command: runner.Command) -> None:
    """The options of a TRL script are options of its parser."""
    pytest.importorskip("trl")
    options = importlib.import_module(command.target).make_parser()._option_string_actions
    given = [word for word in command.args if word.startswith("--")]
    if "--config" in given:
        path = command.args[command.args.index("--config") + 1]
        given += [f"--{key}" for key in re.findall(r"^(\w+):", Path(path).read_text(), re.MULTILINE)]
    assert set(given) - set(options) <= {"--config"}


def test_a_new_command_is_not_passed_over():
    """Nor is an option that its program does not know, a file that is not there, a layout that cannot be."""
    assert elsewhere(Shown("README.md", "hf-parallel fly MODEL")) is None
    for words in (
        "--nproc-per-node 2 --fly -m hf_parallel train.py",
        "--nproc-per-node 3 -m hf_parallel --parallel tp=2 x.py",
    ):
        with pytest.raises((SystemExit, SpecError)):
            run_torchrun(words.split())
    with pytest.raises(AssertionError):
        run_hf_parallel(["plan", "MODEL", "--fly"])


def test_the_keys_that_the_skill_reads(desk, monkeypatch):
    """Of the JSON of `plan` and `doctor`."""
    monkeypatch.chdir(desk)
    text = (ROOT / "integrations" / "skill" / "SKILL.md").read_text()
    best = printed("plan", "MODEL", "--gpus", "8", "--gpu", "h100-80gb")["layouts"][0]
    assert {"spec", "per_device_train_batch_size", "gradient_accumulation_steps"} <= {*best}
    assert all(f"`{key}`" in text for key in ("layouts[0]", "spec", "problems"))
    assert printed("doctor", "MODEL", "--parallel", best["spec"], "--nproc", "8")["problems"] == []


def printed(*words: str) -> dict:
    """The JSON of a command."""
    code, text = run_alone(partial(quietly, partial(cli.main, [*words, "--json"])))
    assert code == 0, text
    return json.loads(text[text.index("{\n") :])
