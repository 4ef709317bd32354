"""A real training step on real ranks, measured three ways: storages, the CPU's allocator, plain sums of bytes."""

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hf_parallel.planner.dryrun.recorder import build_optimizer, get_local_tensor, observe
from tests import models
from tests.counting import CountCollectives


def measured(name: str, spec: str, rows: int, length: int, accumulation: int = 1, **sizes: Any) -> dict[str, Any]:
    """What this rank keeps and sends in its second step, as plain numbers."""
    from hf_parallel import parallelize

    model = parallelize(models.build(name, **sizes), spec).train()
    batches = some_batches(rows, length, accumulation)
    return numbers(observed(model, batches)) | {"sums": plain_sums(model, batches)}


def observed(model: Any, batches: list[dict[str, torch.Tensor]]) -> Any:
    """Without what compares the batches of ranks in the first steps of a run."""
    model._hf_parallel.batches.axes = []
    return observe(model, batches)


def measured_in_a_script(spec: str, rows: int, length: int, accumulation: int, mixed_precision: str) -> dict[str, Any]:
    """The same of a Llama in fp32 that Accelerator prepares, whose own autocast it is."""
    from accelerate import Accelerator

    from hf_parallel.hooks import activation

    activation.activate(spec)
    model = Accelerator(mixed_precision=mixed_precision).prepare(models.build("llama")).train()
    batches = some_batches(rows, length, accumulation)
    observed(model, batches)  # torch 2.15 connects the stages in the first step of a schedule
    found = numbers(observed(model, batches))
    found["traffic"].pop("data", None)  # the hooks count the batch's targets
    return found


def measured_with_adapters(spec: str, rows: int, length: int, folder: str, bits: int) -> dict[str, Any]:
    """The same of a Llama that a script loads, in fp32 or in 4 bits, and gives adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from hf_parallel.hooks import activation

    activation.activate(spec)
    packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=packed if bits == 4 else None)
    get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    return numbers(observed(model.train(), some_batches(rows, length, 1)))


def some_batches(rows: int, length: int, accumulation: int) -> list[dict[str, torch.Tensor]]:
    """What one step accumulates over."""
    tokens = torch.arange(rows * length).view(rows, length) % models.VOCABULARY
    return [{"input_ids": tokens, "labels": tokens} for _ in range(accumulation)]


def numbers(seen: Any) -> dict[str, Any]:
    """What was observed, or dry-run, in plain numbers."""
    traffic = {
        axis: {kind: (t.count, t.payload, t.sent) for kind, t in kinds.items()}
        for axis, kinds in seen.communication.items()
    }
    return {"peak": dict(seen.peak), "kept": dict(seen.kept), "traffic": traffic}


def plain_sums(model: Any, batches: list[dict[str, torch.Tensor]]) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer states, added up without any bookkeeping; and collectives."""
    optimizer = build_optimizer("adamw", model)
    with CountCollectives() as counted:
        for batch in batches[-1:]:
            model(**batch)["loss"].backward()
    gradients = sum(get_local_tensor(p.grad).nbytes for p in model.parameters())
    optimizer.step()
    states = [x for values in optimizer.state.values() for x in values.values()]
    return {
        "parameters": sum(get_local_tensor(x).nbytes for x in (*model.parameters(), *model.buffers())),
        "gradients": gradients,
        "optimizer": sum(get_local_tensor(state).nbytes for state in states),
        **{f"number of {kind}s": count for kind, count in counted.counts.items()},
    }


def allocated(name: str, spec: str, rows: int, length: int, **sizes: Any) -> int:
    """Bytes at the fullest moment of a step on this rank, by what the CPU's allocator reports."""
    from hf_parallel import parallelize

    model = parallelize(models.build(name, **sizes), spec).train()
    tokens = torch.arange(rows * length).view(rows, length) % models.VOCABULARY
    optimizer = build_optimizer("adamw", model)
    held = sum(get_local_tensor(x).nbytes for x in (*model.parameters(), *model.buffers()))
    for step in range(2):
        if step:
            held += sum(get_local_tensor(x).nbytes for values in optimizer.state.values() for x in values.values())
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            model(input_ids=tokens, labels=tokens)["loss"].backward()
            optimizer.step()
        optimizer.zero_grad()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        most = max(most, total)
    return held + most
