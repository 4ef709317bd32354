"""Loading gives each rank its slices and little more: private memory, watched while `from_pretrained` runs."""

import gc
import threading
import time

import pytest
import torch
from transformers import LlamaForCausalLM

from tests import models
from tests.distributed import run, run_alone

MB = 1 << 20
SLACK = (
    32 * MB
)  # module objects, thread stacks and pages of Python itself that a forked rank writes to for the first time
BIG = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}


def save_big(folder: str) -> int:
    """Write a model of more than 300 M parameters in three files; the values do not matter. Returns their number."""
    with torch.device("meta"):
        model = LlamaForCausalLM(models.llama(**BIG))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    model.save_pretrained(folder, max_shard_size="500MB")
    return sum(parameter.numel() for parameter in model.parameters())


def private_bytes() -> int:
    """Memory that belongs to this process alone: what the machine gets back when it ends."""
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith(("Private_Clean", "Private_Dirty")))


class Peak(threading.Thread):
    """Watches private memory every few milliseconds."""

    def __init__(self):
        super().__init__(daemon=True)
        self.bytes, self.done = 0, threading.Event()

    def run(self):
        while not self.done.is_set():
            self.bytes = max(self.bytes, private_bytes())
            time.sleep(0.005)


def load(folder: str, tiny: str) -> dict[str, int]:
    """Load under a layout; sizes in bytes."""
    from hf_parallel import hooks

    hooks.activate("tp=2,dp_shard=2", source="test")
    LlamaForCausalLM.from_pretrained(tiny)  # lazy imports and first use of each path are not the model's memory
    gc.collect()
    before = private_bytes()
    peak = Peak()
    peak.start()
    model = LlamaForCausalLM.from_pretrained(folder)
    peak.done.set()
    peak.join()
    parts = [getattr(parameter, "_local_tensor", parameter) for parameter in model.parameters()]
    return {
        "peak": peak.bytes - before,
        "after": private_bytes() - before,
        "slices": sum(part.numel() * part.element_size() for part in parts),
        "largest": max(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
    }


@pytest.mark.slow
def test_private_memory_while_loading(runs, tmp_path):
    folder = str(tmp_path / "big")
    parameters = run_alone(save_big, folder)
    assert parameters >= 300e6
    ranks = run(load, 4, folder, runs.initial("llama"), init=False)
    print([{key: f"{value / MB:.0f} MB" for key, value in sizes.items()} for sizes in ranks])
    for sizes in ranks:
        assert sizes["slices"] <= 1.02 * 4 * parameters / 4  # 4 bytes, a quarter each; norms are whole under tp
        assert sizes["peak"] <= 1.25 * sizes["slices"] + sizes["largest"] + SLACK
