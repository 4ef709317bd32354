"""`monitor=trace:N` records a run, and `hf-parallel bisect` names the first number in which two runs part."""

import contextlib
import io
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from transformers import LlamaForCausalLM

from hf_parallel import cli
from hf_parallel.ask.config import ParallelConfig
from hf_parallel.prove.bisect import Bisection, Recorded
from tests import loops, models
from tests.distributed import run, run_alone
from tests.prove.faults import FAULTS
from tests.prove.test_faults import SCRIPT
from tests.training import activate, axes

STEPS = 3


def trained(spec: str, folder: str, plant=None, *more: str, script: Path = SCRIPT) -> None:
    """Run the script for three recorded steps, of 8 examples each in all."""
    activate(f"{spec},monitor=trace:{STEPS}")
    if plant is not None:
        plant(torch.distributed.get_rank())
    per_device = 4 // ParallelConfig.parse(spec).resolve(axes(spec)["world"]).data_parallel_size
    options = f"--use_cpu --max_steps={STEPS} --gradient_accumulation_steps=2 --learning_rate=0.01 --save_strategy=no"
    options += f" --adam_epsilon=1e-3 --report_to=none --output_dir={folder}"
    sys.argv = [str(script), *options.split(), f"--per_device_train_batch_size={per_device}", *more]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(str(script), run_name="__main__")


def bisect(one, other) -> tuple[int, str]:
    """The command's exit code and what it prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = cli.main(["bisect", str(one), str(other)])
    return code, said.getvalue()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder of one process's run."""
    folder = tmp_path_factory.mktemp("alone")
    run(trained, 1, "dp_shard=1", str(folder), init=False, timeout=120)
    return folder


@pytest.mark.parametrize("spec", ["tp=2", "dp_shard=2", "pp=2", "cp=2", "tp=2,pp=2,dp_replicate=2"])
def test_runs_that_agree(spec, alone, tmp_path):
    """0, and how much was compared."""
    run(trained, axes(spec)["world"], spec, str(tmp_path), init=False, timeout=120)
    code, said = run_alone(bisect, alone, tmp_path)
    assert code == 0, said
    assert f"in {STEPS} steps, " in said
    assert int(said.split(" steps, ")[1].split()[0]) > 150


def test_padding_of_sequences_in_parts(tmp_path):
    """Data ranks pad each to its own longest example. Under tp no mask marks padding: either order agrees."""
    for spec in ("tp=2", "dp_shard=2"):
        run(trained, 2, spec, str(tmp_path / spec), init=False, timeout=120)
    for one, other in (("tp=2", "dp_shard=2"), ("dp_shard=2", "tp=2")):
        code, said = run_alone(bisect, tmp_path / one, tmp_path / other)
        assert code == 0, said


#: Errors in what is computed; the others are in what is logged, saved or evaluated. Gradients are read before they are
#: clipped: what a callback changes by a thousandth behind that is smaller than what an optimizer makes of rounding.
COMPUTED = [fault for fault in FAULTS if fault.where and fault.name != "a gradient of a stage"]


@pytest.mark.parametrize("fault", COMPUTED, ids=lambda fault: fault.name.replace(" ", "_"))
def test_planted_errors(fault, alone, tmp_path):
    """The module at fault is named."""
    run(trained, axes(fault.spec)["world"], fault.spec, str(tmp_path), fault.plant, init=False, timeout=120)
    parted = Bisection(Recorded(alone), Recorded(tmp_path)).find_first()
    assert parted is not None
    if parted.direction == "optimizer":
        assert fault.kinds == ("weight",), str(parted)
    else:
        assert parted.name.removesuffix(".weight").removesuffix(".bias") == fault.where, str(parted)


def test_other_batches(alone, tmp_path):
    """Runs that read twice as many examples are told so."""
    run(trained, 2, "dp_shard=2", str(tmp_path), None, "--per_device_train_batch_size=4", init=False, timeout=120)
    code, said = run_alone(bisect, tmp_path, alone)
    assert code == 1
    assert "PARTED in step 1, forward pass: the outputs of model.embed_tokens" in said
    assert "looks like: other batches" in said


#: The mean of a script over the targets of its own data rank, and over some of them, whose count nothing knows.
MEANS = {
    "seen": "torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())",
    "unseen": "-(logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels > 60)).sum() "
    "/ (labels > 60).sum()",
}


@pytest.mark.parametrize("kind", MEANS)
def test_means_of_means(kind, tmp_path):
    """A mean by torch is weighted by the targets of data ranks, so runs agree. A mean that nothing sees parts them."""
    script, one = tmp_path / "own.py", "--gradient_accumulation_steps=1"
    own = f"""class Own(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")[:, 1:]
        logits = model(**inputs).logits[:, :-1]
        return {MEANS[kind]}


if __name__"""
    script.write_text(SCRIPT.read_text().replace("if __name__", own).replace("trainer = Trainer(", "trainer = Own("))
    run(trained, 2, "tp=2", str(tmp_path / "tp"), None, one, init=False, timeout=120)
    run(trained, 2, "dp_shard=2", str(tmp_path / "dp"), None, one, script=script, init=False, timeout=120)
    code, said = run_alone(bisect, tmp_path / "tp", tmp_path / "dp")
    assert code == (kind == "unseen"), said
    assert kind == "seen" or ("gradient of lm_head.weight" in said and "a mean per data rank" in said), said
    gradients = [Recorded(tmp_path / name).samples(1) for name in ("tp", "dp")]
    off = max(abs(gradients[1][name].norm / own.norm - 1) for name, own in gradients[0].items())
    assert (off < 1e-5) is (kind == "seen")  # whatever `bisect` takes for rounding


def looped(spec: str, folder: str) -> None:
    """Train two recorded steps in a loop."""
    activate(f"{spec},monitor=trace:2")
    accelerator = Accelerator(cpu=True, project_dir=folder)
    torch.manual_seed(3)
    model = LlamaForCausalLM(models.llama())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in loops.rows(2, 3, 17):
        loops.take_step(accelerator, model, optimizer, model(input_ids=batch, labels=batch).loss)


def test_loops(tmp_path):
    """Those of Accelerate are recorded in `project_dir`."""
    run(looped, 1, "dp_shard=1", str(tmp_path / "one"), init=False, timeout=120)
    run(looped, 2, "tp=2", str(tmp_path / "two"), init=False, timeout=120)
    code, said = run_alone(bisect, tmp_path / "one", tmp_path / "two")
    assert code == 0, said
    assert "in 2 steps, " in said


def test_files_of_other_runs(alone, tmp_path):
    """Ranks beyond a run's are a former one's and left out; one that lacks is told."""
    for rank in (0, 1):
        shutil.copy(alone / "hf_parallel-trace" / "rank-0.pt", tmp_path / f"rank-{rank}.pt")
    code, said = run_alone(bisect, alone, tmp_path)
    assert code == 0, said
    (tmp_path / "rank-0.pt").write_bytes((tmp_path / "rank-0.pt").read_bytes()[:2000])
    code, said = run_alone(bisect, alone, tmp_path)
    assert code == 2
    assert "rank-0.pt: cannot be read" in said
    (tmp_path / "rank-0.pt").unlink()
    code, said = run_alone(bisect, alone, tmp_path)
    assert code == 2
    assert "lacks records of dp_shard=1" in said or "has some of another run" in said


def test_a_trace_that_cannot_be_written(tmp_path, capfd):
    """Training goes on, and a line says why."""
    (tmp_path / "hf_parallel-trace").write_text("in the way")
    run(trained, 2, "tp=2", str(tmp_path), init=False, timeout=120)
    assert "rank-1.pt is not written: " in capfd.readouterr().err


def test_a_folder_without_a_trace(alone, tmp_path):
    """2, with the setting that makes one."""
    code, said = run_alone(bisect, alone, tmp_path)
    assert code == 2
    assert "holds no trace; train with monitor=trace:4" in said
