"""Start a script under a real launcher, and be sure that nothing of it is left afterwards."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "HF_PARALLEL")


#: A user's script, in a process that knows nothing of tests: `train.py FOLDER NAME BATCH …`.
_SCRIPT = """
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

folder, name, batch = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
attempt, rank = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)), os.environ.get("RANK", "0")


class Accident(TrainerCallback):
ACCIDENT

torch.manual_seed(0)
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (ROWS, 16))]
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2,
)
arguments = TrainingArguments(
    str(folder / name), per_device_train_batch_size=batch, report_to=[], max_steps=STEPS, save_steps=2,
    logging_steps=1, learning_rate=1e-2, disable_tqdm=True, use_cpu=True,
)
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows, callbacks=[Accident()])
trainer.train()
losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
if trainer.is_world_process_zero():
    (folder / f"{name}.json").write_text(json.dumps([attempt, losses]))
"""


def write_script(path: Path, accident: str, steps: int, rows: int = 44) -> Path:
    """Write a script that trains a tiny Llama, saves every other step, and leaves its attempt and losses in NAME.json.

    Args:
        accident: methods of a callback, which may ask for `folder`, `name`, `rank` and `attempt`.
    """
    body = textwrap.indent(textwrap.dedent(accident).strip("\n"), "    ")
    path.write_text(_SCRIPT.replace("ACCIDENT", body).replace("STEPS", str(steps)).replace("ROWS", str(rows)))
    return path


@dataclass
class Ended:
    """How a launch ended: exit code, what it wrote, and when (seconds since the epoch)."""

    code: int
    out: str
    err: str
    when: float

    @property
    def refusals(self) -> list[str]:
        """The lines that hf_parallel itself wrote on stderr."""
        return [line for line in self.err.splitlines() if line.startswith("hf_parallel:")]


def torchrun(processes: int, spec: str, *options: str) -> list[str]:
    """The command line of the runner under torchrun, up to the script."""
    torch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*torch, *options, "-m", "hf_parallel", "--parallel", spec]


def hf_parallel_launch(processes: int, spec: str) -> list[str]:
    """The command line of the project's own launcher, up to the script."""
    return [sys.executable, "-m", "hf_parallel.cli", "launch", "--num_processes", str(processes), "--parallel", spec]


def environment() -> dict[str, str]:
    """Without what another launcher may have left in it."""
    kept = {key: value for key, value in os.environ.items() if key not in _OF_LAUNCHERS}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}


def launch(command: list[str], *arguments: str, timeout: float = 120.0) -> Ended:
    """Run a launcher to its end; all of its processes are killed if that takes longer than `timeout` seconds."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*command, *arguments], env=environment(), start_new_session=True, **pipes)
    try:
        out, err = process.communicate(timeout=timeout)
        return Ended(process.returncode, out, err, time.time())
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
