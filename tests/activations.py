"""What one Llama layer keeps for the backward: counted, and by the formula of docs/reference/activation_formula.md.

python -m tests.activations            the table of that page
"""

import tempfile
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests import models
from tests.distributed import run

BATCH, LENGTH = 2, 256
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1792,  # 3.5 h, as in Llama 3
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
    "max_position_embeddings": LENGTH,
}


class SavedBytes:
    """Inside, counts the bytes autograd keeps: each storage once, without the storages of `known` tensors."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        self._known = {_storage(tensor)._cdata for tensor in known}
        self._kept: dict[int, torch.UntypedStorage] = {}  # held, or an address could come twice
        self._hooks = saved_tensors_hooks(self._keep, lambda tensor: tensor)

    def __enter__(self) -> "SavedBytes":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    @property
    def total(self) -> int:
        """Bytes kept so far."""
        return sum(storage.nbytes() for pointer, storage in self._kept.items() if pointer not in self._known)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = _storage(tensor)
        self._kept[storage._cdata] = storage
        return tensor


def _storage(tensor: Any) -> torch.UntypedStorage:
    """The memory behind a tensor: a DTensor's on this rank, an asynchronous result's own."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    return getattr(tensor, "elem", tensor).untyped_storage()


def saved_by_layer(model: Any, autocast: bool = False) -> int:
    """Bytes the last layer of `model` keeps on this rank; not counted: weights, and cos and sin, which all share."""
    layer, counted = model.model.layers[-1], []
    forward: Callable = layer.forward

    def count(*args: Any, **kwargs: Any) -> Any:
        with SavedBytes([*model.parameters(), *kwargs["position_embeddings"]]) as saved:
            output = forward(*args, **kwargs)
        counted.append(saved.total)
        return output

    layer.forward = count
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model.train()(input_ids=torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % models.VOCABULARY)
    return counted[0]


def own_bytes(spec: str | None, dtype: torch.dtype, autocast: bool = False) -> int:
    """`saved_by_layer` under `spec`; without one, of plain transformers."""
    model = models.build("llama", **SIZES).to(dtype)
    if spec is not None:
        from hf_parallel import parallelize

        parallelize(model, spec)
    return saved_by_layer(model, autocast)


def kept_by_layers(spec: str, way: str, adapt: Callable = lambda model: model) -> float:
    """Bytes per layer that all layers of a bf16 model keep on this rank under a kind of checkpointing.

    Args:
        adapt: adds adapters, which are kept too.
    """
    from hf_parallel import parallelize

    model: Any = models.build("llama", **SIZES).to(torch.bfloat16).train()
    parallelize(model, f"{spec},activation_checkpointing={way},lean_loss=false")
    layers, held, recorder = model.model.layers, [], Alive()
    model = adapt(model)
    layers[0].register_forward_pre_hook(lambda *_: held.append(recorder.bytes))
    layers[-1].register_forward_hook(lambda *_: held.append(recorder.bytes))
    with recorder:
        model(input_ids=torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % models.VOCABULARY)
    return (held[1] - held[0]) / len(layers)


class Alive(TorchDispatchMode):
    """Counts the bytes of storages that come into being inside and are still there, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self._note((args, kwargs), counts=False)
        output = func(*args, **(kwargs or {}))
        self._note(output, counts=True)
        return output

    def _note(self, tensors: Any, counts: bool) -> None:
        for tensor in tree_leaves(tensors):
            storage = _storage(tensor) if torch.is_tensor(tensor) else None
            if storage is not None and storage._cdata not in self._known:
                self._known.add(storage._cdata)
                size = storage.nbytes() * counts
                self.bytes += size
                self.most = max(self.most, self.bytes)
                weakref.finalize(storage, self._gone, storage._cdata, size)

    def _gone(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.bytes -= size


def planned(tp: int, way: str) -> float:
    """The same by the planner."""
    from hf_parallel.planner.activations import count_kept_bytes
    from hf_parallel.planner.layout import Job, Layout
    from hf_parallel.planner.shape import shape_of

    shape = shape_of(models.build("llama", **SIZES).to(torch.bfloat16))
    job = Job(LENGTH, BATCH, 1, recompute=way, precision="bf16", engine="hf_parallel")
    layout = Layout(tp=tp, sequence_parallel=tp > 1)
    return BATCH * LENGTH * count_kept_bytes(shape.blocks[0], shape.hidden, layout, job)


def transformers_bytes(folder: str, tp: int) -> int:
    """`saved_by_layer` under transformers' own tensor parallelism, of the model saved in `folder`."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=tp)
    return saved_by_layer(AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype="auto"))


def formula(tp: int, dtype: torch.dtype, autocast: bool = False) -> float:
    """Bytes per rank: s b h / t (2 (4 + e) + c (4 + 2 g + 4 r) + (4 a + 8) / h): docs/reference/activation_formula.md.

    e and c are bytes per element of the residual stream and of the matrix products.
    """
    h, heads, width = SIZES["hidden_size"], SIZES["num_attention_heads"], SIZES["intermediate_size"]
    g, r = SIZES["num_key_value_heads"] / heads, width / h
    residual, compute = dtype.itemsize, 2 if autocast else dtype.itemsize
    per_element = 2 * (4 + residual) + compute * (4 + 2 * g + 4 * r) + (4 * heads + 8) / h
    lowered_weights = 2 * h * (2 * (1 + g) * h + 3 * width) if autocast else 0  # of q, k, v, o; gate, up, down
    return (BATCH * LENGTH * h * per_element + lowered_weights) / tp


def transformers_formula(tp: int) -> float:
    """The same in bf16 where norms and inputs of regions are whole on every rank."""
    h, heads = SIZES["hidden_size"], SIZES["num_attention_heads"]
    g, r = SIZES["num_key_value_heads"] / heads, SIZES["intermediate_size"] / h
    return BATCH * LENGTH * h * (16 + 8 / h + (4 + 4 * g + 8 * r + 4 * heads / h) / tp)


def main() -> None:
    """Print the table: bytes per rank and layer, and per s b h."""
    with tempfile.TemporaryDirectory() as folder:
        models.build("llama", **SIZES).to(torch.bfloat16).save_pretrained(folder)
        print("| tp | measured | formula | per s·b·h | transformers' own | per s·b·h | ratio |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for tp in (1, 2, 4, 8):
            own = run(own_bytes, tp, f"tp={tp}", torch.bfloat16)[0]
            plain = run(transformers_bytes, tp, folder, tp)[0] if tp > 1 else own
            unit = BATCH * LENGTH * SIZES["hidden_size"]
            cells = [f"{own:,}", f"{formula(tp, torch.bfloat16):,.0f}", f"{own / unit:.2f}"]
            print("|", " | ".join([str(tp), *cells, f"{plain:,}", f"{plain / unit:.2f}", f"{plain / own:.2f}"]), "|")


if __name__ == "__main__":
    main()
