"""What a parallel model's own methods do, put on the object: so plain loops without the hooks have them too."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from hf_parallel.anatomy import text_config
from hf_parallel.checkpoint import save_pretrained
from hf_parallel.collectives import meet
from hf_parallel.config import ParallelConfig, SpecError
from hf_parallel.mesh import ParallelMesh


def replace_methods(model: Any, mesh: ParallelMesh, pipelined: bool) -> None:
    """Save whole weights, keep the size of the embedding, generate on ranks that end apart and through a pipeline."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained = functools.partial(_save_pretrained, model, mesh)
    if hasattr(model, "resize_token_embeddings"):
        model.resize_token_embeddings = functools.partial(_keep_size, model)
    if hasattr(model, "set_use_kernels"):
        model.set_use_kernels = functools.partial(_set_use_kernels, model, mesh.config)
    if mesh.data_size > 1 and hasattr(model, "prepare_inputs_for_generation"):
        _generate_together(model)
    if pipelined and hasattr(model, "generate"):
        model.generate = functools.partial(_generate_without_cache, model, mesh)


def _save_pretrained(model: Any, mesh: ParallelMesh, *args: Any, **kwargs: Any) -> None:
    if kwargs.get("state_dict") is None:
        meet("save_pretrained")
    save_pretrained(model, mesh, *args, **kwargs)


def _keep_size(model: Any, wanted: int | None = None, pad_to_multiple_of: int | None = None, **_: Any) -> Any:
    """`resize_token_embeddings` to the size they have, as scripts ask for after they have loaded a tokenizer."""
    rows = getattr(text_config(model), "vocab_size", 0)
    wanted, step = rows if wanted is None else wanted, pad_to_multiple_of or 1
    if -(-wanted // step) * step == rows:
        return model.get_input_embeddings()
    raise NotImplementedError(
        f"hf_parallel: resize_token_embeddings of a parallel model from {rows} to {-(-wanted // step) * step} rows is "
        "not part of this version; resize and save the model in one process first"
    )


def check_kernels(config: ParallelConfig) -> None:
    """Kernels replace the forward passes of layers: of split ones too, which would not communicate any more.

    Raises:
        SpecError: layers or stages are split.
    """
    for key, size in (("tp_size", config.tp_size), ("pp_size", config.pp_size)):
        if size > 1:
            raise SpecError(f"use_kernels=True replaces split layers; {key}=1 with dp_shard works")


def _set_use_kernels(model: Any, config: ParallelConfig, use_kernels: bool, *args: Any, **kwargs: Any) -> None:
    if use_kernels:
        check_kernels(config)
    type(model).set_use_kernels(model, use_kernels, *args, **kwargs)


def _generate_together(model: Any) -> None:
    """In `generate` ranks whose rows have ended go on with the others, which gather weights with them.

    That is transformers' doing. Without a key/value cache it lets their masks grow, too: longer than the rows.
    """
    prepare = model.prepare_inputs_for_generation

    def prepare_inputs(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        mask = kwargs.get("attention_mask")
        whole_rows = not kwargs.get("use_cache") and kwargs.get("inputs_embeds") is None
        if whole_rows and torch.is_tensor(mask) and mask.ndim == 2 and not model.config.is_encoder_decoder:
            kwargs["attention_mask"] = mask[:, : input_ids.shape[1]]
        return prepare(input_ids, *args, **kwargs)

    model.prepare_inputs_for_generation = prepare_inputs


def _generate_without_cache(model: Any, mesh: ParallelMesh, *args: Any, **kwargs: Any) -> Any:
    """`generate` through a pipeline: every token runs the whole row, as stages keep no key/value cache."""
    if kwargs.get("past_key_values") is not None or kwargs.get("use_cache"):
        raise NotImplementedError("hf_parallel: a pipelined model keeps no key/value cache; leave use_cache out")
    if mesh.data_size > 1:
        kwargs.setdefault("synced_gpus", True)  # data ranks stop together: their stages gather weights together
    seed = torch.randint(2**31, (1,)).to(mesh.device)
    for axis in ("pp", "tp"):  # the ranks of one model draw the same tokens
        dist.broadcast(seed, group=mesh.group(axis), group_src=0)
    with mesh.fork_random_state():
        torch.manual_seed(int(seed))
        return type(model).generate(model, *args, **kwargs, use_cache=False)
