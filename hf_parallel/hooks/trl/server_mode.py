"""TRL's `use_vllm` with `vllm_mode=server`: completions come from another process, weights go there in buckets.

Rank 0 of all asks for the completions of the global batch; each data rank takes its rows, all ranks of a model the
same. Weights are gathered from the shards of all stages as they are sent: no rank holds the whole model.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel import checkpoint
from hf_parallel.hooks import runtime
from hf_parallel.hooks.accelerate.data import replacing
from hf_parallel.hooks.patching import patch, replace
from hf_parallel.rollouts import transfer
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from trl import GRPOTrainer
    from trl.generation.vllm_client import VLLMClient
    from trl.generation.vllm_generation import VLLMGeneration

_CLIENT = "trl.generation.vllm_client:VLLMClient"
#: What PEFT puts around a layer, which its weight's own name has not.
_WRAPPERS = (".base_layer", "modules_to_save.default.")


# ---- weights --------------------------------------------------------------------------------------------------------


class WholeModel(nn.Module):
    """Stands for a parallel model where TRL reads the weights that it sends. Has no modules of its own."""

    generation: VLLMGeneration
    model: PreTrainedModel

    def __init__(self, generation: VLLMGeneration) -> None:
        super().__init__()
        vars(self).update(generation=generation, model=generation.model)

    def named_parameters(  # type: ignore[override] # tensors, which TRL takes
        self, *args: object, **kwargs: object
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors of all stages on rank 0, which sends them; the others take part and yield nothing."""
        if self.generation._weight_metadata is None:  # asked for names and shapes, which are known without the values
            for entry in (entry for group in _groups(self) for entry in group.entries):
                yield entry.name, torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            return
        adapted = hasattr(self.model, "merge_adapter")
        if adapted:
            self.model.merge_adapter()
        try:
            own, stored = _own_names(self.model), checkpoint.parameters(_base(self.model))
            local = {name: tensor for given, tensor in stored.items() if (name := own(given)) is not None}
            for name, tensor in checkpoint.streamed(_groups(self), local, runtime.mesh(), transfer.BUCKET):
                yield name, tensor.to(runtime.mesh().device)
        finally:
            if adapted:
                self.model.unmerge_adapter()


def shown_whole(generation: VLLMGeneration) -> contextlib.AbstractContextManager:
    """In here TRL reads whole weights; what it would read itself is this rank's part of its own stage."""
    parallel = runtime.parallel_state(generation.model) is not None
    return replacing(generation, model=WholeModel(generation)) if parallel else contextlib.nullcontext()


def _groups(whole: WholeModel) -> list:
    """What is sent, in its order; collective the first time."""
    kept = whole.generation
    if not hasattr(kept, "_hf_parallel_groups"):
        base, own = _base(whole.model), _own_names(whole.model)
        kept._hf_parallel_groups = checkpoint.parameter_groups(base, runtime.mesh(), own)
    return kept._hf_parallel_groups


def _base(model: PreTrainedModel) -> PreTrainedModel:
    return model.get_base_model() if hasattr(model, "peft_config") else model


def _own_names(model: PreTrainedModel) -> Callable[[str], str | None]:
    """The name of a base's parameter without wrappers; None for an adapter's, and for what one trains in its place."""
    prefix = getattr(model, "prefix", None) if hasattr(model, "peft_config") else None

    def own(name: str) -> str | None:
        if prefix is not None and (prefix in name or "original_module" in name):
            return None
        for wrapper in _WRAPPERS if prefix is not None else ():
            name = name.replace(wrapper, "")
        return name

    return own


# ---- how far the server is off -------------------------------------------------------------------------------------


def correct_means(trainer: GRPOTrainer, outputs: dict) -> None:
    """TRL logs the mean over processes of means over their tokens: of the global batch it is one over all tokens."""
    mesh, ratio = runtime.mesh(), outputs.get("importance_sampling_ratio")
    if ratio is None or mesh.data_size == 1:
        return
    mask = outputs["completion_mask"].bool()
    gap = (outputs["old_per_token_logps"] - outputs["sampling_per_token_logps"]).abs()
    weights = ratio.flatten() if ratio.shape[1] == 1 else ratio[mask]  # of sequences, or of tokens
    gap, weights = gap[mask & ~gap.isnan()], weights[~weights.isnan()]
    totals = torch.stack(
        [gap.sum(), weights.sum(), *(torch.tensor(v.numel(), device=v.device) for v in (gap, weights))]
    )
    dist.all_reduce(totals, group=mesh.data_group)
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    for place, name in enumerate(("sampling_logp_difference", "importance_sampling_ratio")):
        metrics[f"sampling/{name}/mean"][-1] = float(totals[place] / totals[place + 2].clamp(min=1))


# ---- the stand-in for vLLM's server ---------------------------------------------------------------------------------


@replace(
    "trl.generation.{vllm_client,vllm_generation}:is_vllm_available",
    "asks for vLLM where only its server is talked to",
    since="1.16",
)
def available(original: Callable) -> Callable:
    """Whether it is needed the server tells, in `init_communicator`."""
    return lambda *args, **kwargs: True


@patch(f"{_CLIENT}.init_communicator", "knows vLLM's NCCL engine alone", since="1.16")
def init_communicator(original: Callable, self: VLLMClient, device: int | torch.device = 0) -> None:
    """To the stand-in, which names another way, over that."""
    found = self.get_server_info()["weight_transfer_config"]
    if found is None or found["backend"] != transfer.BACKEND:
        if importlib.util.find_spec("vllm") is None:
            what = f"the server at {self.base_url} takes weights over NCCL, for which vLLM is needed here too"
            refuse("use_vllm=True", what, "a server of `python -m hf_parallel.rollouts`")
        original(self, device)
        return
    info = {
        "master_address": transfer.address_towards(self.host),
        "master_port": self.group_port,
        "rank_offset": 1,
        "world_size": self.get_world_size() + 1,
    }
    with _asking(self, "init_weight_transfer_engine", init_info=info):
        self.communicator = transfer.Channel(info, 0)


@contextlib.contextmanager
def _asking(client: VLLMClient, what: str, **told: dict) -> Iterator[None]:
    """A request beside what is done: inside of it the server waits for this side."""
    with ThreadPoolExecutor(1) as executor:
        answer = executor.submit(client._post, f"{client.base_url}/{what}", json=told)
        yield
        answer.result()


@patch(f"{_CLIENT}.update_named_params", "sends over vLLM's NCCL engine alone", since="1.16")
def update_named_params(original: Callable, self: VLLMClient, metadata: list, named_params: Iterator) -> None:
    """Announced over HTTP, then sent."""
    if not isinstance(self.communicator, transfer.Channel):
        original(self, metadata, named_params)
        return
    names, dtype_names, shapes = (list(column) for column in zip(*metadata, strict=True))
    info = {"names": names, "dtype_names": dtype_names, "shapes": shapes}
    if not self._updating_weights:
        self._start_weight_update()
    with _asking(self, "update_weights", update_info=info):
        self.communicator.send(tensor for _, tensor in named_params)
    if not self._updating_weights:
        self._finish_weight_update()
