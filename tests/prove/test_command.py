"""The command of `hf-parallel prove`: its verdict, exit code and certificate, and what a real run says of it."""

import contextlib
import importlib.abc
import io
import json
import os
import runpy
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_parallel import cli
from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.spec import list_shipped_recipes
from hf_parallel.axes.tensor.lean_loss import LazyLogits, Source
from hf_parallel.cli import prove
from hf_parallel.cli.recipe_check import shrink_layout
from hf_parallel.cli.recipe_file import load_recipe
from hf_parallel.prove import certificate
from hf_parallel.prove.certificate import format_line_about
from hf_parallel.prove.compare import Compared, Comparison, Difference
from hf_parallel.prove.locate import describe_suspect, find_first_place_of
from hf_parallel.prove.processes import ForkedRun
from hf_parallel.prove.record import Record, Step, TokenWatch, sample_of
from hf_parallel.prove.small_run import SumsInAnotherOrder
from tests import models
from tests.distributed import run, run_alone
from tests.prove import table
from tests.prove.test_faults import ARGUMENTS, SCRIPT
from tests.training import activate


def command(folder: Path | None, *arguments: str) -> tuple[int, str]:
    """The exit code, and everything that was printed; in a process of its own, which goes to the folder."""
    said = io.StringIO()
    if folder is not None:
        os.chdir(folder)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = cli.main(["prove", *arguments])
    return code, said.getvalue()


def start_of_a_run(spec: str, folder: str) -> str:
    """What a rank says when the script trains under the layout."""
    activate(spec)
    said = io.StringIO()
    os.chdir(folder)
    with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        sys.argv = [str(SCRIPT), *ARGUMENTS, "--use_cpu", "--max_steps=1", "--eval_strategy=no", "--save_strategy=no"]
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return said.getvalue()


def test_proof_of_a_script(tmp_path):
    """PROVED, 0, and the line at the start of the real run."""
    code, said = run_alone(command, tmp_path, "--parallel", "tp=2", str(SCRIPT), *ARGUMENTS)
    assert code == 0, said
    assert "PROVED: dp_shard=1,tp=2" in said
    (proof,) = json.loads((tmp_path / "prove.json").read_text())["proofs"]
    assert proof["proved"]
    assert proof["counts"]["gradient"] == 2 * 4 * 30  # ranks, steps, parameters
    assert max(proof["worst"].values()) < 1
    shown, _ = run(start_of_a_run, 2, "tp=2", str(tmp_path), init=False)
    assert f"prove         proved on {proof['date']} for this layout" in shown


def test_a_certificate_that_cannot_be_written(tmp_path):
    """The verdict stands, and a line says so."""
    arguments = ("--parallel", "tp=2", "--out", "missing/prove.json", str(SCRIPT), *ARGUMENTS)
    code, said = run_alone(command, tmp_path, *arguments)
    assert code == 0, said
    assert "cannot write missing/prove.json" in said


def test_a_model_without_a_script(tmp_path):
    """Generated examples: padding on both sides, holes, labels that do not count."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "vocab_size": 515}
    config |= {"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 5632}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, said = run_alone(command, tmp_path, "--parallel", "dp_shard=2", str(tmp_path))
    assert code == 0, said
    assert "note: LlamaForCausalLM has 4 layers of width 64" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--parallel", "auto", "train.py"], "--num_processes 4 works"),
        (["--parallel", "tp=2", "--gpu", "h100-80gb", "train.py"], "--parallel auto works"),
        (["train.py"], "--parallel tp=2 works"),
        (["--parallel", "tp=2", "missing.py"], "no such script"),
        (["--parallel", "dp_shard=2,pack_tokens=64", str(SCRIPT)], "padding_free=true works"),
        (["--parallel", "tp=2", "--steps", "2", str(SCRIPT)], "--steps 4 works"),
        (["--parallel", "tp=2", str(SCRIPT), "--parallel", "pp=2"], "before the script"),
    ],
)
def test_what_is_refused(arguments, words):
    """With 2, before anything runs."""
    code, said = command(None, *arguments)
    assert code == 2
    assert words in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_gpus_that_are_not_there(tmp_path):
    """Refused; tests/cuda proves on devices."""
    code, said = run_alone(command, tmp_path, "--parallel", "tp=2", "--device", "cuda", str(SCRIPT))
    assert code == 2
    assert "--device cpu works" in said


def imports_before_a_fork():
    """Which GPUs libraries see that the parent of the runs imports, and what is visible afterwards."""
    seen = []

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name == "hf_parallel.hooks.proving":
                seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))

    sys.modules.pop("hf_parallel.hooks.proving", None)
    sys.meta_path.insert(0, Finder())
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,3"
    torch.cuda.device_count = lambda: 2
    return prove._prepare_process("cuda"), seen, os.environ["CUDA_VISIBLE_DEVICES"]


def test_nothing_starts_cuda_before_the_forks():
    """torchao asks triton for the GPU while it is imported; on an H100 every forked process failed."""
    assert run_alone(imports_before_a_fork) == (2, [""], "0,3")


def end_while_writing(rank):
    """Fail, and be killed when half of the reason is written, as the second of two processes that fail is."""

    def half(path, text):
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    Path.write_text = half
    raise KeyError("no such column")


def test_a_process_that_is_ended_while_it_says_why(tmp_path):
    """What is left of its file is not read."""
    failure = ForkedRun("one process", tmp_path, end_while_writing, [{}]).wait(20.0)
    assert "was killed" in failure.message


def test_a_script_that_fails(tmp_path):
    """Its own error, and 2."""
    script = tmp_path / "broken.py"
    script.write_text("raise KeyError('no such column')")
    code, said = run_alone(command, tmp_path, "--parallel", "tp=2", str(script))
    assert code == 2
    assert "not proved: in one process" in said
    assert "no such column" in said


def test_what_a_run_says(tmp_path):
    """Nothing of another layout or a script that has changed; other versions by name."""
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    file = tmp_path / "prove.json"
    certificate.write_proof(file, str(script), "tp=2", {"proved": True})
    assert "for this layout" in format_line_about(str(script), "tp=2", file)
    assert format_line_about(str(script), "tp=4", file) is None
    proofs = json.loads(file.read_text())
    proofs["proofs"][0]["versions"]["torch"] = "1.0"
    file.write_text(json.dumps(proofs))
    assert "torch 1.0" in format_line_about(str(script), "tp=2", file)
    script.write_text("print(2)")
    assert format_line_about(str(script), "tp=2", file) is None


def proof_beside(folder: Path, temporary: Path, *arguments: str) -> tuple[int, str]:
    """`command` where the folder is no temporary one."""
    temporary.mkdir()
    tempfile.tempdir = str(temporary)
    return command(folder, *arguments)


def test_files_of_the_user_stay(tmp_path):
    """A new folder is written aside and compared; one that exists is refused, and keeps what it has."""
    home = tmp_path / "home"
    home.mkdir()
    script = home / "train.py"
    script.write_text(SCRIPT.read_text().replace("trainer.save_model()", 'trainer.save_model("final")'))
    words = ("--parallel", "tp=2", "train.py", *ARGUMENTS)
    code, said = run_alone(proof_beside, home, tmp_path / "first", *words)
    assert code == 0, said
    assert sorted(path.name for path in home.iterdir()) == ["prove.json", "train.py"]
    (home / "final").mkdir()
    (home / "final" / "model.safetensors").write_text("mine")
    code, said = run_alone(proof_beside, home, tmp_path / "second", *words)
    assert code == 2
    assert f"{home}/final" in said
    assert [path.name for path in (home / "final").iterdir()] == ["model.safetensors"]
    assert (home / "final" / "model.safetensors").read_text() == "mine"


MEAN = """
class MeanOfAll(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss + outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss

"""


def test_a_loss_that_reads_padding(tmp_path):
    """Under cp it is refused with the same words as in training: outputs there are not one process's."""
    text = SCRIPT.read_text().replace('if __name__ == "__main__":', f'{MEAN}if __name__ == "__main__":')
    (tmp_path / "train.py").write_text(text.replace("trainer = Trainer(", "trainer = MeanOfAll("))
    code, said = run_alone(command, tmp_path, "--parallel", "cp=2", "train.py", *ARGUMENTS)
    assert code == 2, said
    assert "cp_size=2: the loss reads outputs of" in said


@pytest.mark.parametrize("gpu", [[], ["--gpu", "h100-80gb"]], ids=["this machine", "h100"])
def test_auto(gpu, tmp_path):
    """What auto chooses for the script's own sizes is proved."""
    code, said = run_alone(
        command, tmp_path, "--parallel", "auto", "--num_processes", "2", *gpu, str(SCRIPT), *ARGUMENTS
    )
    assert code == 0, said
    (proof,) = json.loads((tmp_path / "prove.json").read_text())["proofs"]
    assert f"prove: auto chooses {proof['spec']} (" in said
    assert ParallelConfig.parse(proof["spec"]).world_size == 2


def write_preferences(folder: str) -> None:
    """A tiny model, and the data of `trl kto`."""
    from tests import trl_scripts

    trl_scripts.write_data(folder)
    trl_scripts.write_model(f"{folder}/llama")


def test_a_trainer_that_reads_its_sizes_before_trainer_does(tmp_path):
    """KTO exchanges completions in batches of a size that it reads first: they are the same in all runs."""
    pytest.importorskip("trl")
    run_alone(write_preferences, str(tmp_path / "data"))
    flags = "--max_length 64 --learning_rate 1e-2 --adam_epsilon 1e-3 --per_device_train_batch_size 8 --bf16 false"
    places = f"--model_name_or_path {tmp_path}/data/llama --dataset_name {tmp_path}/data/preference --output_dir out"
    arguments = [*flags.split(), *places.split(), "--save_strategy", "no"]
    code, said = run_alone(command, tmp_path, "--parallel", "dp_shard=2", "-m", "trl.scripts.kto", *arguments)
    assert code == 0, said


ACCELERATE = """
import torch
from accelerate import Accelerator
from tests import loops, models
from transformers import LlamaForCausalLM

torch.manual_seed(3)
accelerator = Accelerator(cpu=True)
model = LlamaForCausalLM(models.llama())
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3))
for batch in loops.rows(9, 3, 17):
    accelerator.backward(model(input_ids=batch, labels=batch).loss)
    optimizer.step()
    optimizer.zero_grad()
"""


def start_of_a_loop(spec: str, folder: str) -> str:
    """What a rank says when a loop trains under the layout."""
    activate(spec)
    os.chdir(folder)
    sys.argv = ["loop.py"]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        runpy.run_path("loop.py", run_name="__main__")
    return said.getvalue()


def test_the_real_run_of_a_loop(tmp_path):
    """It says once that it is proved."""
    (tmp_path / "loop.py").write_text(ACCELERATE)
    code, said = run_alone(command, tmp_path, "--parallel", "tp=2", "loop.py")
    assert code == 0, said
    shown, other = run(start_of_a_loop, 2, "tp=2", str(tmp_path), init=False)
    assert shown.count("hf_parallel: hf-parallel prove: proved on ") == 1
    assert "proved" not in other


COUNTED = """
import torch
from accelerate import Accelerator
from tests import models
from transformers import LlamaForCausalLM

torch.manual_seed(3)
accelerator = Accelerator(cpu=True)
examples = [ids.clone() for ids in torch.randint(3, 500, (44, 17))]
for number, ids in enumerate(examples):
    ids[-number % 13 :] = 1
loader = torch.utils.data.DataLoader(examples, batch_size=4)
model = LlamaForCausalLM(models.llama())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for ids in loader:
    labels = ids.masked_fill(ids == 1, -100)
    count = accelerator.gather((labels[:, 1:] != -100).sum()).sum()
    logits = model(input_ids=ids).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / count
    accelerator.backward(loss TIMES)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(("times", "expected"), [("* accelerator.num_processes", 0), ("", 1)], ids=["right", "wrong"])
def test_a_loop_that_undoes_the_mean_of_data_ranks(times, expected, tmp_path):
    """It divides by the targets of all ranks, and must multiply by their number; one process has no such mean."""
    (tmp_path / "loop.py").write_text(COUNTED.replace("TIMES", times))
    code, said = run_alone(command, tmp_path, "--parallel", "dp_shard=2", "loop.py")
    assert code == expected, said


LOOP = """
import os, torch, hf_parallel
from tests import loops, models
from transformers import LlamaForCausalLM

torch.manual_seed(3)
model = hf_parallel.parallelize(LlamaForCausalLM(models.llama()), "tp=2")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
for batch in loops.rows(9, 3, 17):
    loss = model(input_ids=batch, labels=batch).loss * (1 + FACTOR * int(os.environ.get("RANK", 0)))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
raise SystemExit(3)  # behind the last step of the proof
"""


@pytest.mark.parametrize(("factor", "expected"), [("0.0", 0), ("0.01", 1)])
def test_a_loop_of_torch(factor, expected, tmp_path):
    """One with `hf_parallel.parallelize` and no Accelerator; right, and with a loss that depends on the rank."""
    (tmp_path / "loop.py").write_text(LOOP.replace("FACTOR", factor))
    code, said = run_alone(command, tmp_path, "--parallel", "tp=2", "loop.py")
    assert code == expected, said
    assert ("where: the backward pass in step 1" in said) == bool(expected), said


LAUNCHED = """
import os, torch, torch.distributed as dist
from tests import loops
from transformers import LlamaForCausalLM

READ
dist.init_process_group("gloo")
torch.manual_seed(3)
model = LlamaForCausalLM.from_pretrained("llama")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
for batch in loops.rows(9, 3, 17):
    loss = model(input_ids=batch, labels=batch).loss * (1 + FACTOR * dist.get_rank())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def save_llama(folder: Path) -> None:
    """The model of a loop that the launcher starts."""
    torch.manual_seed(3)
    LlamaForCausalLM(models.llama()).save_pretrained(folder / "llama")


@pytest.mark.parametrize(
    ("spec", "changes", "expected", "words"),
    [
        ("tp=2", {"READ": 'local_rank = int(os.environ["LOCAL_RANK"])', "FACTOR": "0"}, 0, "PROVED: dp_shard=1,tp=2"),
        ("tp=2", {"READ": "", "FACTOR": "0.01"}, 1, "where: the backward pass in step 1"),
        ("dp_shard=2", {"READ": "", "FACTOR": "0"}, 2, "prove a layout with one data rank, such as tp=2"),
        (
            "tp=2",
            {
                "READ": "from tests import models",
                'from_pretrained("llama")': "__call__(models.llama())",
                "FACTOR": "0",
            },
            2,
            "trained no model that a layout reaches",
        ),
    ],
    ids=["right", "a rank's own loss", "data ranks", "a model that no layout reaches"],
)
def test_a_loop_that_joins_its_processes_itself(spec, changes, expected, words, tmp_path):
    """One process gets the launcher's variables, too; what the script makes on its own is no layout's."""
    text = LAUNCHED
    for old, new in changes.items():
        text = text.replace(old, new)
    (tmp_path / "loop.py").write_text(text.replace(".__call__", ""))
    run_alone(save_llama, tmp_path)
    code, said = run_alone(command, tmp_path, "--parallel", spec, "loop.py")
    assert code == expected, said
    assert words in said, said


def test_a_loop_of_torch_on_data_ranks(tmp_path):
    """It deals its data itself: refused by name."""
    (tmp_path / "loop.py").write_text(LOOP.replace("FACTOR", "0"))
    code, said = run_alone(command, tmp_path, "--parallel", "dp_shard=2", "loop.py")
    assert code == 2
    assert "prove a layout with one data rank, such as tp=2" in said


def test_a_large_vocabulary():
    """Torch's log-softmax over 152,064 classes is off by 2e-4 on a CPU; summed otherwise, it shows as much."""
    logits = 3 * torch.randn(4, 152064, generator=torch.Generator().manual_seed(3))
    plain = logits.log_softmax(-1)
    with SumsInAnotherOrder():
        other = logits.log_softmax(-1)
    error = (plain.double() - logits.double().log_softmax(-1)).abs().max()
    assert (plain - other).abs().max() > 0.5 * error


@pytest.mark.parametrize(("bias", "differs"), [(2.2e-8, False), (1e-4, True)])
def test_gradients_that_are_zero_but_for_rounding(bias, differs):
    """The bias in front of a softmax over choices has none: 2e-8 and 4e-8 are the same beside gradients of size 1."""

    def seen(last):
        gradients = {"weight": sample_of(torch.ones(3)), "norm": sample_of(torch.ones(2)), "bias": last}
        return Record(steps=[Step(gradients=gradients)])

    alone = seen(sample_of(torch.tensor([3.7e-8])))
    compared = Comparison([seen(sample_of(torch.tensor([bias])))], alone, alone).compare()
    assert bool(compared.differences) == differs
    assert compared.counts["gradient"] == 3


@pytest.mark.parametrize(("data_ranks", "words"), [(1, "weights or tokens of one rank"), (2, "its own examples")])
def test_a_number_of_one_rank(data_ranks, words):
    """A stage sums its own parameters, a data rank its own examples."""
    compared = Compared([Difference("metric", "squares", 1, 1314.0, 2708.0, 0.51, 8e-6)], {}, {})
    assert words in describe_suspect(compared, None, Record(), data_ranks)


def test_the_batch_of_a_step():
    """Only the second batch of a step is off: the module and that batch are named, also where layers run again."""

    def seen(factor: float) -> Record:
        torch.manual_seed(3)
        record = Record()
        model = torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(3)))
        watch = TokenWatch(model, lambda: record.step(0))
        for own, batch in zip((1.0, factor, 1.0), torch.randn(3, 4, 7, 5), strict=True):
            hook = model[1].register_forward_hook(lambda _, args, output, own=own: output * own, prepend=True)
            model(batch)
            model[1](model[0](batch))
            hook.remove()
        watch.remove()
        return record

    alone, off = seen(1.0), Difference("loss", "loss", 1, 2.0, 1.0, 1.0, 1e-5)
    place = find_first_place_of([seen(1.1)], alone, alone, Compared([off], {}, {}))
    assert (place.module, place.step) == ("1", 1)
    assert "the first in batch 2 of 3" in place.words


def test_logits_that_nobody_reads():
    """They are left to the loss, which a run without a proof computes of the head's input."""

    class Head(torch.nn.Linear):
        def forward(self, hidden):
            return LazyLogits.of(Source(self, hidden, self.weight, None, pytest.fail), hidden.shape, hidden.dtype)

    record, model = Record(), torch.nn.Sequential(torch.nn.Linear(5, 5), Head(5, 5))
    watch = TokenWatch(model, lambda: record.step(0), backward=True)
    assert model(torch.randn(2, 5)).made is None
    watch.remove()
    assert list(record.step(0).tokens) == ["0"]


@pytest.mark.parametrize(("shown", "differs"), [([1.0, -100.0], False), ([1.1, -100.0], True)])
def test_predictions_that_are_filled_up(shown, differs):
    """A data rank's predictions end with its own longest example; Trainer fills them with -100."""
    alone, rank = Record(predictions=[torch.tensor([1.0, 7.0])]), Record(predictions=[torch.tensor(shown)])
    assert bool(Comparison([rank], alone, alone).compare().differences) == differs


def test_inputs_of_relu_near_zero():
    """Rounding may decide whether they have a gradient: noise decides otherwise, and leaves the others alone."""
    inputs = torch.tensor([1.0, 3e-7, -3e-7, 0.0, 0.1, -0.1], requires_grad=True)
    with SumsInAnotherOrder():
        outputs = inputs.relu()
        outputs.sum().backward()
    torch.testing.assert_close(outputs, inputs.detach().relu(), rtol=0, atol=1e-6)
    assert inputs.grad.tolist() == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]


def test_recipes(capfd):
    """`recipe check --prove` proves a recipe's layout with fewer ranks, adapters included."""
    assert run_alone(cli.main, ["recipe", "check", "--no-dry-run", "--prove", "mistral-7b-lora-4x24gb-ethernet"]) == 0
    said = capfd.readouterr().out
    small = "pp=4,dp_shard=1,pipeline_microbatches=8,activation_checkpointing=full"
    assert f"prove: {small} in the place of pp=4,dp_shard=1,pipeline_microbatches=32" in said
    assert f"PROVED: {small}" in said


def test_layouts_of_recipes():
    """Each can be proved with 8 processes or fewer, and keeps its kinds of parallelism."""
    for name in list_shipped_recipes():
        recipe = load_recipe(name)
        layout = shrink_layout(recipe)
        assert layout.world_size <= 8, name
        kept = {axis for axis, size in layout.sizes.items() if size > 1}
        assert kept == {axis for axis, size in recipe.layout.sizes.items() if size > 1}, name


def test_page_of_proofs():
    """It is what `python -m tests.prove.table --write` makes of the results, but for its date."""
    made, kept = (text.splitlines() for text in (table.page(table.tables()), table.PAGE.read_text()))
    assert [line for line in made if "wrote this page on" not in line] == [
        line for line in kept if "wrote this page on" not in line
    ]
