"""Importing this before torch gives a CPU build of torch CUDA devices and NCCL; see `native/device.cpp`.

    PRETENDED_CUDA_DEVICES=8    how many there are
    PRETENDED_CUDA_BACKEND=…    what `init_process_group("gloo")` of a test makes instead, such as cpu:gloo,cuda:nccl

In one process a script sees one device, as Trainer would spread its batch over all that it sees.
"""

from __future__ import annotations

import collections
import ctypes
import importlib.util
import os
import sys
import types
from pathlib import Path

from tests.cuda.build import NAME, build

assert "torch" not in sys.modules, "import tests.cuda.device before torch, which asks once whether there is CUDA"
_library = build()
os.environ.setdefault("PRETENDED_CUDA_DEVICES", "8")
_torch = Path(importlib.util.find_spec("torch").origin).parent
ctypes.CDLL(str(_torch / "lib" / "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
ctypes.CDLL(str(_library))  # before `import torch` its hooks are taken
sys.path.insert(0, str(_library.parent))

import pretended_cuda as native  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.distributed_c10d as c10d  # noqa: E402

assert native.is_hooked(), f"{NAME} came too late"
CAPABILITY = (9, 0)
MEMORY = 80 << 30
cuda = torch.cuda


def device_count() -> int:
    """All for a rank, one for a script on its own."""
    return native.device_count() if int(os.environ.get("WORLD_SIZE", "1")) > 1 else 1


def index_of(device=None) -> int:
    """The number of a device as torch.cuda's functions take it."""
    if device is None or isinstance(device, int):
        return native.get_device() if device is None else device
    found = torch.device(device).index
    return native.get_device() if found is None else found


def exchange_device(index: int) -> int:
    """Switch to a device, if it is one; returns the former."""
    former = native.get_device()
    if index >= 0:
        native.set_device(index)
    return former


# ---- streams and events: torch's own classes, made for this device ------------------------------------------------


class _Instances(type):
    """A class that torch's own streams are instances of too: those that C++ makes."""

    def __instancecheck__(cls, value):
        return isinstance(value, torch.Stream)


class Stream(torch.Stream, metaclass=_Instances):
    """`torch.cuda.Stream`."""

    def __new__(cls, device=None, priority=0, **kwargs):
        if "stream_id" not in kwargs:
            kwargs = {"device": torch.device("cuda", index_of(device)), "priority": priority}
        return super().__new__(cls, **kwargs)


def stream_of(device, stream_id: int) -> Stream:
    """The stream of that number."""
    return Stream(stream_id=stream_id, device_index=index_of(device), device_type=1)


def current_stream(device=None) -> Stream:
    """`torch.cuda.current_stream`."""
    return stream_of(device, torch.accelerator.current_stream(index_of(device)).stream_id)


class Event(torch.Event):
    """`torch.cuda.Event`."""

    def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
        return super().__new__(cls, "cuda", enable_timing=enable_timing)


class StreamContext:
    """`torch.cuda.stream(s)`."""

    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        if self.stream is not None:
            self.former = torch.accelerator.current_stream(self.stream.device.index)
            torch.accelerator.set_stream(self.stream)

    def __exit__(self, *error):
        if self.stream is not None:
            torch.accelerator.set_stream(self.former)


def _replace_streams() -> None:
    cuda.Stream = cuda.streams.Stream = Stream
    cuda.Event = cuda.streams.Event = Event
    cuda.stream = cuda.StreamContext = StreamContext
    cuda.current_stream = current_stream
    cuda.default_stream = lambda device=None: stream_of(device, 0)
    cuda.set_stream = torch.accelerator.set_stream
    cuda.get_sync_debug_mode = lambda: int(native.warns_of_waits())
    cuda.set_sync_debug_mode = lambda mode: native.warn_of_waits(mode not in (0, "default"))
    cuda.synchronize = lambda device=None: torch.accelerator.synchronize(index_of(device))


# ---- devices, memory, random numbers -------------------------------------------------------------------------------
_FIELDS = {
    **{"name": "NVIDIA H100 80GB HBM3", "major": CAPABILITY[0], "minor": CAPABILITY[1], "total_memory": MEMORY},
    **{"multi_processor_count": 132, "warp_size": 32, "gcnArchName": "", "L2_cache_size": 50 << 20},
    **{"regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048, "is_integrated": 0},
    **{"shared_memory_per_multiprocessor": 233472, "pci_bus_id": 0},
}


def properties(device=None):
    """Of an H100; each device has a uuid of its own."""
    return types.SimpleNamespace(**_FIELDS, uuid=f"pretended-{index_of(device)}")


def _replace_devices() -> None:
    cuda._initialized, cuda._lazy_init, cuda.init = True, lambda: None, lambda: None
    cuda.is_initialized = cuda.is_available = cuda._is_compiled = lambda: True
    cuda.device_count = cuda._device_count_nvml = torch._C._cuda_getDeviceCount = device_count
    cuda.current_device = torch._C._cuda_getDevice = native.get_device
    cuda.set_device = lambda device: native.set_device(index_of(device))
    torch._C._cuda_setDevice = native.set_device
    cuda._exchange_device = torch._C._cuda_exchangeDevice = exchange_device
    # torch.compile has a rule for each of the two, so they are two functions
    cuda._maybe_exchange_device = torch._C._cuda_maybeExchangeDevice = lambda index: exchange_device(index)
    torch._C._cuda_isInBadFork = lambda: False
    torch._C._cuda_getCurrentRawStream = torch._C._cuda_getCurrentBlasHandle = lambda *index: 0
    torch.version.cuda = "12.8"
    torch.backends.cuda.is_built = lambda: True
    cuda.get_device_properties = properties
    cuda.get_device_capability = lambda device=None: CAPABILITY
    cuda.get_device_name = lambda device=None: _FIELDS["name"]
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.get_arch_list = lambda: ["sm_90"]
    cuda.can_device_access_peer = lambda one, other: True
    runtime = dict.fromkeys(("cudaHostRegister", "cudaHostUnregister"), lambda *arguments: 0)
    cuda.cudart = lambda: types.SimpleNamespace(**runtime, cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0)


def memory_stats(device=None) -> dict[str, int]:
    """In the form of the caching allocator, which has cached nothing."""
    held, peak = native.allocated(), native.peak()
    kinds = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes", "inactive_split_bytes")
    values = {"current": held, "peak": peak, "allocated": held, "freed": 0}
    found = {
        f"{kind}.{pool}.{when}": value
        for kind in (*kinds, "allocation", "segment")
        for pool in ("all", "small_pool", "large_pool")
        for when, value in values.items()
    }
    return collections.OrderedDict(found | dict.fromkeys(("num_alloc_retries", "num_ooms", "num_sync_all_streams"), 0))


def _replace_memory() -> None:
    import torch.accelerator.memory as accelerator_memory

    def held(device=None):
        return native.allocated()

    def peak(device=None):
        return native.peak()

    def nothing(device=None):
        return None

    def reset(device=None):
        native.reset_peak()

    both = {
        **{
            "memory_allocated": held,
            "memory_reserved": held,
            "max_memory_allocated": peak,
            "max_memory_reserved": peak,
        },
        **{"memory_stats": memory_stats, "empty_cache": nothing, "reset_peak_memory_stats": reset},
        "reset_accumulated_memory_stats": nothing,
    }
    for name, function in both.items():
        for module in (cuda, cuda.memory, accelerator_memory, torch.accelerator):
            setattr(module, name, function)
    cuda.mem_get_info = cuda.memory.mem_get_info = lambda device=None: (MEMORY - native.allocated(), MEMORY)
    cuda.ipc_collect = nothing


def _replace_random() -> None:
    generators = tuple(native.generator(index) for index in range(native.device_count()))

    def seed_all(seed):
        for one in generators:
            one.manual_seed(int(seed))

    def set_all(states):
        for one, state in zip(generators, states, strict=False):
            one.set_state(state)

    functions = {
        "default_generators": generators,
        "get_rng_state": lambda device="cuda": generators[index_of(device)].get_state(),
        "set_rng_state": lambda state, device="cuda": generators[index_of(device)].set_state(state),
        "get_rng_state_all": lambda: [one.get_state() for one in generators],
        "set_rng_state_all": set_all,
        "manual_seed": lambda seed: generators[native.get_device()].manual_seed(int(seed)),
        "manual_seed_all": seed_all,
        "initial_seed": lambda: generators[native.get_device()].initial_seed(),
        "seed": lambda: None,
        "seed_all": lambda: None,
    }
    for name, function in functions.items():
        setattr(cuda, name, function)
        setattr(cuda.random, name, function)


# ---- storages ------------------------------------------------------------------------------------------------------


def _replace_storages() -> None:
    resize, to = torch.UntypedStorage.resize_, torch.storage._to

    def resize_(self, size):
        if self.device.type != "cuda":
            return resize(self, size)
        whole = torch.empty(0, dtype=torch.uint8, device=self.device)
        with torch.no_grad():
            whole.set_(self)
        native.resize_storage(whole, size)
        return None

    def to_device(self, device, non_blocking=False):
        if torch.device(device).type != "cuda":
            return to(self, device, non_blocking)
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self).to(device, copy=True).untyped_storage()

    torch.UntypedStorage.resize_, torch.storage._to = resize_, to_device


# ---- NCCL ----------------------------------------------------------------------------------------------------------


class ProcessGroupNCCL(native.PretendedNCCL):
    """`torch.distributed.ProcessGroupNCCL`."""

    class Options(native.PretendedNCCL.Options):
        """As torch's own."""

        def __init__(self, is_high_priority_stream=False):
            super().__init__(is_high_priority_stream)
            self.config, self.split_from, self.split_color = types.SimpleNamespace(), None, 0

    def __init__(self, store, rank, size, options=None):
        self._given = options or ProcessGroupNCCL.Options()
        self._store = dist.PrefixStore("gloo_of_nccl", store)
        gloo = c10d.ProcessGroupGloo(self._store, rank, size, timeout=self._given._timeout)
        super().__init__(gloo, rank, size, self._given)
        _groups.append(self)  # C++ knows the base only

    @property
    def options(self):
        """What the group was made with."""
        return self._given

    def perform_nocolor_split(self, device):
        """Nothing is split."""

    def _is_initialized(self):
        return True

    def comm_split_count(self):
        """None has been."""
        return 0

    def _set_default_timeout(self, timeout):
        self._given._timeout = timeout

    def _set_enable_nan_check(self, on):
        pass


_groups: list[ProcessGroupNCCL] = []


def _replace_nccl() -> None:
    c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = torch._C._distributed_c10d.ProcessGroupNCCL = ProcessGroupNCCL
    c10d._NCCL_AVAILABLE = True
    cuda.nccl.version = lambda: (2, 27, 5)
    cuda.nccl.is_available = lambda tensors=None: True
    instead, init = os.environ.get("PRETENDED_CUDA_BACKEND"), c10d.init_process_group
    if instead is None:
        return

    def init_process_group(backend=None, *args, **kwargs):
        native.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        return init(instead if backend == "gloo" else backend, *args, **kwargs)

    c10d.init_process_group = dist.init_process_group = init_process_group


for _replaced in (
    _replace_devices,
    _replace_streams,
    _replace_memory,
    _replace_random,
    _replace_storages,
    _replace_nccl,
):
    _replaced()

import tests.cuda.kernels  # noqa: E402, F401
