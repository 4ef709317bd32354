"""An accelerator that is not there, to count what would make the CPU wait for it.

    counts = distributed.run_alone(step)          # in a process of its own: the device is registered once
        with pretend_gpu(rank, size) as device:
            model = parallel(config, ParallelMesh.create(spec, device))
            with without_values(model, device), CountSyncs() as syncs:
                ...                               # forward, backward on tensors of `device`
        syncs.ours                                # Counter of "axes/pipeline/engine.py:51 item"

Tensors there have no values (torch's fake tensors), so all collectives go to a fake process group.
"""

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hf_parallel
from hf_parallel.apply.parallelize import parallelize_model
from hf_parallel.model.anatomy import build_on_meta
from hf_parallel.planner.dryrun.world import fake_tensors_pass_as_real, materialise_weights
from hf_parallel.ranks.mesh import ParallelMesh

NAME = "pretend"
_aten = torch.ops.aten
#: Operations whose result has a shape, or is a number, that only the accelerator knows.
_WAITS = {
    _aten._local_scalar_dense.default: "item",
    _aten.nonzero.default: "nonzero",
    _aten.masked_select.default: "masked_select",
    _aten.equal.default: "equal",
    _aten._unique2.default: "unique",
    _aten.unique_consecutive.default: "unique",
    _aten.repeat_interleave.Tensor: "repeat_interleave",
}
_COPIES = {_aten._to_copy.default, _aten.copy_.default}


class CountSyncs(TorchDispatchMode):
    """What makes the process wait for the accelerator, by place and kind: numbers, blocking copies, shapes.

    `ours`: where the innermost frame that is not torch's is of this package. `others`: elsewhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ours: Counter[str] = Counter()
        self.others: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        devices = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        kind = _kind(func, args, kwargs, devices)
        if kind is not None:
            self._note(kind)
        if func is _aten._local_scalar_dense.default or func is _aten.equal.default:
            return 1
        if func is _aten._to_copy.default and str(kwargs.get("device")).startswith(NAME):
            # torch would try to copy constants.
            return torch.empty_like(args[0], dtype=kwargs.get("dtype"), device=kwargs["device"])
        return func(*args, **kwargs)

    def _note(self, kind: str) -> None:
        frame: Any = sys._getframe(2)
        while frame is not None and _is_of(frame, torch) or frame.f_code.co_filename == __file__:
            frame = frame.f_back
        ours = frame is not None and _is_of(frame, hf_parallel)
        name = frame.f_code.co_filename.rpartition("hf_parallel/" if ours else "site-packages/")[2]
        (self.ours if ours else self.others)[f"{name}:{frame.f_lineno} {kind}"] += 1


def _kind(func: Any, args: tuple, kwargs: dict, devices: set[str]) -> str | None:
    if func in _COPIES:
        target = (
            args[0].device if func is _aten.copy_.default else torch.device(kwargs.get("device") or args[0].device)
        )
        source = args[1].device if func is _aten.copy_.default else args[0].device
        waits = not kwargs.get("non_blocking") and NAME in (target.type, source.type)
        return f"copy {source.type} -> {target.type}" if waits and target.type != source.type else None
    if NAME not in devices:
        return None
    if func in (_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default):
        indices = [index for index in args[1] if index is not None]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            return "index by a mask"
        return "index from the host" if any(index.device.type != NAME for index in indices) else None
    return _WAITS.get(func)


def _is_of(frame: Any, package: Any) -> bool:
    return frame.f_code.co_filename.startswith(package.__path__[0] + "/")


@contextlib.contextmanager
def pretend_gpu(rank: int, size: int) -> Iterator[torch.device]:
    """This process as one of `size`, each with an accelerator: the device to work on. Once in a process."""
    device = _registered()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.Backend.backend_capability[dist.Backend.FAKE].append(NAME)
    dist.Backend.default_device_backend_map[NAME] = dist.Backend.FAKE
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def parallel(config: Any, mesh: ParallelMesh, adapt: Any = None) -> Any:
    """The model of a config, parallel, its weights on the meta device; `adapt` puts adapters into it."""
    model = build_on_meta(config).train()
    with mock.patch.object(torch, "empty", functools.partial(_empty, torch.empty)):
        parallelize_model(model, mesh=mesh)
    if adapt is not None:
        adapt(model)
    return model


@contextlib.contextmanager
def without_values(model: Any, device: torch.device) -> Iterator[None]:
    """In here tensors have no values, those of the model lie on the device."""
    made = functools.partial(_tensor, torch.tensor)
    with mock.patch.object(torch, "tensor", made), fake_tensors_pass_as_real(), _valueless:
        materialise_weights(model, device)
        yield


_valueless = FakeTensorMode(allow_non_fake_inputs=True)


def _empty(original: Any, *size: Any, **kwargs: Any) -> torch.Tensor:
    """FSDP2 makes one on its device before there are values anywhere."""
    with _valueless if str(kwargs.get("device")).startswith(NAME) else contextlib.nullcontext():
        return original(*size, **kwargs)


def _tensor(original: Any, data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
    """As torch does it: on the host, and then copied. Without the value, which torch would remember."""
    value = original(data, *args, **kwargs)
    return value if device is None else torch.empty(value.shape, dtype=value.dtype).to(device)


def _registered() -> torch.device:
    from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

    stream: Any = torch.cpu.Stream()
    stream.stream_id, stream.device_index, stream.device_type = 0, 0, 20  # which torch 2.15 tells an operation

    class Module(_DummyBackendModule):
        """What torch asks of the device's module."""

        default_generators = (torch.Generator(),)

        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float16]

        def get_rng_state(self, device: Any = None) -> torch.Tensor:
            return torch.get_rng_state()

        def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
            pass

        def current_stream(self, device: Any = None) -> Any:
            return stream

        def __getattr__(self, name: str) -> Any:
            return getattr(torch.cpu, name)  # streams that do nothing

    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    _autocast()
    return torch.device(NAME, 0)


_libraries: list[Any] = []


def _autocast() -> None:
    """Products are lowered, as on a GPU; all else is left alone."""
    rest, products = (torch.library.Library(name, "IMPL", "AutocastPrivateUse1") for name in ("_", "aten"))
    rest.fallback(torch.library.fallthrough_kernel)
    for name in ("linear", "matmul", "mm", "bmm", "addmm", "scaled_dot_product_attention"):
        products.impl(name, functools.partial(_lowered, getattr(_aten, name).default))
    _libraries.extend([rest, products])


def _lowered(operation: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    def lower(value: Any) -> Any:
        floats = torch.is_tensor(value) and value.dtype == torch.float32
        return value.to(torch.get_autocast_dtype(NAME)) if floats else value

    with torch.autocast(NAME, enabled=False):
        return operation(*map(lower, args), **{name: lower(value) for name, value in kwargs.items()})
