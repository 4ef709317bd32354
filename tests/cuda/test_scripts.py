"""Scripts of other tests on pretended CUDA devices and NCCL: Trainer, Accelerate, TRL, saving, resuming, generation.

Each case is a run of pytest on some of the parity tests, whose own comparisons with one process decide; a fault of
streams fails them too.
"""

from __future__ import annotations

import pytest

from tests.cuda.worker import run_pytest

pytestmark = pytest.mark.timeout(900)

#: File of tests/parity, and what `-k` selects there.
SCRIPTS = {
    "trainer": ("test_trainer.py", "test_same_numbers and llama and (tp2_pp2 or dp_shard2)"),
    "accelerate": ("test_accelerate_loop.py", "tp2_dp_shard2"),
    "sft": ("test_trl.py", "test_sft and tp2"),
    "async save": ("test_async_save.py", "test_the_same_checkpoints"),
    "resume": ("test_resume.py", "bit_for_bit or a_stream_goes_on"),
    "save_state": ("test_save_state.py", "from_layout_to_layout"),
    "fp16": ("test_fp16.py", ""),
    "lora": ("test_lora.py", "bf16 or dora or best_checkpoint"),
    "mixed precision": ("test_mixed_precision.py", ""),
    "zero stages": ("test_zero_stages.py", ""),
    "offload": ("test_offload.py", ""),
    "tensor parallelism": ("test_tensor_parallel.py", ""),
    "pipeline": ("test_pipeline.py", ""),
    "context": ("test_context.py", ""),
    "experts": ("test_experts.py", ""),
    "activation memory": ("test_activation_memory.py", "offload"),
    "optimizers": ("test_optimizers.py", ""),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_script(script):
    file, selected = SCRIPTS[script]
    ran = run_pytest(f"tests/parity/{file}", *(("-k", selected) if selected else ()))
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
