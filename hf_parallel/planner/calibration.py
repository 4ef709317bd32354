"""The measurements of `hf-parallel check --calibrate`, as a file, and a cluster that is planned with them.

    read_calibration()                       # the file of this machine, or None
    calibrated_cluster(cluster, found)       # the same machine with measured rates and links
    remember_step(...)                       # a finished run: what its step took
    measured_step(...)                       # which `plan` shows beside its prediction

One machine is measured once for each number of processes: processes that share cores, memory or links slow each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.spec import refuse
from hf_parallel.planner.candidates import list_sizes_of
from hf_parallel.planner.hardware import Cluster, Efficiency, Gpu
from hf_parallel.planner.layout import Layout, make_job
from hf_parallel.planner.ledger import FACTORS, ring_factor
from hf_parallel.planner.predict import predict_step
from hf_parallel.planner.shape import ModelShape, shape_of

#: Names another place of the file.
VARIABLE = "HF_PARALLEL_CALIBRATION"
_PLACE = os.path.join("~", ".cache", "hf_parallel", "calibration.json")
VERSION = 2
#: Versions whose files are read: the first has one probe and all-reduces alone.
_READ = (1, VERSION)
_MOST_STEPS = 200  # that are remembered


@dataclass(frozen=True)
class Measured:
    """Best times of one number of processes at work together, the slowest of them; seconds, bytes, FLOPs.

    Attributes:
        products: of matrices [m, k] x [k, n]: dtype, m, n, k, seconds.
        odd: how many times as long a product takes whose n is no multiple of 64.
        attention: flash or sdpa, causal: rows, heads, width of a head, tokens, seconds forward, seconds backward.
        bandwidth: bytes per second that element-wise kernels read and write.
        kernel_us: of the host, for a kernel that has next to nothing to do.
        update_bytes: per second of Adam's update, at 40 bytes per parameter.
        all_reduce: bytes and seconds, small and large; empty for one process.
        copy: bytes per second from host to device; 0 on a CPU.
        probe: a training step of a small model without communication: numbers of the model, rows, tokens, seconds.
        probes: the same of more layers and more tokens, which tell what each layer costs from what each token costs.
        collectives: kinds with bytes and seconds, small and large, named as in `Link.measured`: bare, and as an axis
            makes them with its copies and its host's time.
        contention: which part of a collective's seconds the compute beside it loses; 1 where it needs the core.
    """

    products: Sequence[tuple[str, int, int, int, float]]
    odd: float
    attention: tuple[int, int, int, int, float, float]
    bandwidth: float
    kernel_us: float
    update_bytes: float
    all_reduce: Sequence[tuple[int, float]]
    copy: float
    probe: tuple[dict[str, int], int, int, float]
    probes: Sequence[tuple[dict[str, int], int, int, float]] = ()
    collectives: Sequence[tuple[str, int, float]] = ()
    contention: float = 1.0


@dataclass
class Calibration:
    """The file: a device, and what was measured by number of processes.

    Attributes:
        device: name of the accelerator; of a CPU its kind and number of cores.
        steps: of finished runs: what `remember_step` writes.
    """

    device: str
    date: str
    versions: dict[str, str]
    processes: dict[int, Measured]
    steps: list[dict] = field(default_factory=list)

    def write(self, path: str) -> None:
        """Replace the file at once, so that a reader never sees half of it."""
        values = {"version": VERSION, **dataclasses.asdict(self)}
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump(values, file, indent=1)
        os.replace(f"{path}.new", path)


def choose_calibration_path(given: str | None = None) -> str:
    """Return where the file is: as given, as HF_PARALLEL_CALIBRATION says, or in the user's cache."""
    return os.path.expanduser(given or os.environ.get(VARIABLE) or _PLACE)


def read_calibration(path: str | None = None) -> Calibration | None:
    """Return the file's content; None if there is none.

    Raises:
        SpecError: it is damaged, or of another version.
    """
    path = choose_calibration_path(path)
    if not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
        if values.pop("version") not in _READ:
            raise ValueError("another version")
        measured = {int(count): Measured(**own) for count, own in values.pop("processes").items()}
        return Calibration(**values, processes=measured)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"is no calibration that this version reads ({error})"
        refuse(path, why, "hf-parallel check --calibrate", cause=error)


def name_device(cluster: Cluster) -> str:
    """Name what a calibration holds for: the kind of accelerator, or the CPU with its cores."""
    return f"cpu x{os.cpu_count()}" if cluster.gpu.name == "cpu" else cluster.gpu.name


# ---- planning with it -----------------------------------------------------------------------------------------------


def calibrate_cluster_here(cluster: Cluster, found: Calibration | None) -> Cluster:
    """Return the cluster with measured rates and links, if they are those of its device.

    Processes per node that were not measured take the nearest number that was.
    """
    if found is None or found.device != name_device(cluster) or not found.processes:
        return cluster
    here = min(cluster.gpus, cluster.per_node)
    count = min(found.processes, key=lambda number: (abs(number - here), number))
    measured = found.processes[count]
    several = "" if count == here else f" with {count} processes"
    source = f"calibrated on {found.date}{several}"
    gpu = _fit_gpu(cluster.gpu, measured, source)
    inside, points = cluster.inside, measured.all_reduce
    if count >= 2 and len(points) >= 2:
        # Latency and bandwidth of the planner's ring, fitted to an all-reduce of a small and of a large tensor.
        (_, small), (size, large) = points[0], points[-1]
        bandwidth = size * ring_factor("all_reduce", count) / max(large - small, large / 10)
        latency = small / (FACTORS["all_reduce"] * (count - 1))
        kinds = list[tuple[str, float, float]]()  # each by itself: seconds per step of a ring, bytes per second
        for name in dict.fromkeys(name for name, _, _ in measured.collectives):
            (few, small), *_, (size, large) = ((size, s) for own, size, s in measured.collectives if own == name)
            kind = name.split()[-1]
            rate = (size - few) * ring_factor(kind, count) / max(large - small, large / 10)
            kinds.append((name, small / (1 if kind == "p2p" else count - 1), rate))
        inside = dataclasses.replace(
            inside, bandwidth=bandwidth, latency=latency, source=source, measured=tuple(kinds)
        )
    if gpu.name != "cpu":
        return _fit_host(dataclasses.replace(cluster, gpu=gpu, inside=inside), measured)
    took = {number: sum(probe[-1] for probe in one.probes or [one.probe]) for number, one in found.processes.items()}
    alone = min(1.0, took[1] / took[count]) if 1 in took else 1.0
    fitted = dataclasses.replace(cluster, gpu=gpu, inside=inside, alone=alone)
    return _fit_layers(fitted, measured) if measured.probes else _fit_passes(fitted, measured)


def _fit_gpu(gpu: Gpu, measured: Measured, source: str) -> Gpu:
    """Fit rates: a product takes 2 m n (k + depth) / rate; attention and element-wise kernels take what was seen."""
    peaks, on_cpu = dict(gpu.peaks), gpu.name == "cpu"
    rates: dict[str, tuple[float, float]] = {}
    for dtype in dict.fromkeys(product[0] for product in measured.products):
        rates[dtype] = _fit_rate_and_depth([product for product in measured.products if product[0] == dtype])
    lowered = "bf16" if "bf16" in rates and not on_cpu else next(iter(rates))
    rate, depth = rates[lowered]
    if on_cpu:
        peaks |= {dtype: own for dtype, (own, _) in rates.items()}
    gemm = rate / peaks[lowered]
    rows, heads, width, tokens, forward, backward = measured.attention
    scores = rows * heads * tokens * tokens / 2
    flops = 4.0 * width * scores
    exponentials = scores / (16 * gpu.units * 1.5e9)
    attention = flops / (peaks[lowered] * max(forward - exponentials, forward / 10))
    again = 2.5 * flops / (peaks[lowered] * attention * max(backward - exponentials, backward / 10))
    bandwidth = measured.bandwidth if on_cpu else gpu.bandwidth
    changes: dict[str, float] = {
        "gemm": gemm,
        "depth": depth,
        "misaligned": 1 / measured.odd,
        "attention": attention,
        "attention_backward": again,
        "flash": 0.0,
        "cudnn": 0.0,
        "memory": measured.bandwidth / bandwidth,
        "update_passes": measured.bandwidth / measured.update_bytes,
        "link": 1.0,
    }
    if on_cpu:  # a GPU's host is fitted to steps (`_fit_host`): autograd, modules and hooks take more than a launch
        changes |= {"eager_us": measured.kernel_us, "eager_step_ms": 1.0}
        changes |= {"waves": 0.0, "contention": measured.contention, "wait_us": 0.0}
    efficiency: Efficiency = dataclasses.replace(gpu.efficiency, **changes)
    host = dataclasses.replace(gpu.host, pcie=measured.copy) if measured.copy else gpu.host
    return dataclasses.replace(
        gpu, peaks=peaks, bandwidth=bandwidth, efficiency=efficiency, host=host, source=source, like=""
    )


def _fit_rate_and_depth(products: Sequence[tuple[str, int, int, int, float]]) -> tuple[float, float]:
    """Fit seconds = 2 m n (k + depth) / rate by least squares of relative errors; `depth` is not below 0."""
    points = [(k, seconds / (2 * m * n)) for _, m, n, k, seconds in products]
    a = sum(k * k / y**2 for k, y in points)
    b = sum(k / y**2 for k, y in points)
    c = sum(1 / y**2 for _, y in points)
    p, q = sum(k / y for k, y in points), sum(1 / y for _, y in points)
    determinant = a * c - b * b
    slope, offset = ((p * c - q * b) / determinant, (a * q - b * p) / determinant) if determinant else (0.0, -1.0)
    if slope <= 0 or offset < 0:
        slope, offset = p / a, 0.0
    return 1 / slope, offset / slope


def _fit_passes(cluster: Cluster, measured: Measured) -> Cluster:
    """Find the element-wise traffic with which the planner predicts the probe's step as it was measured.

    Where products by themselves would take longer than the step did, they ran faster in it, and are predicted so.
    """
    seconds, e = measured.probe[-1], cluster.gpu.efficiency
    low, high = 0.05, 1e4
    for _ in range(40):
        least = _predict_probe(cluster, measured.probe, eager_passes=low)
        if least <= seconds:
            break
        faster = cluster.gpu.efficiency.gemm / e.gemm * least / seconds
        cluster = _change_efficiency(cluster, gemm=e.gemm * faster, attention=e.attention * faster)
    for _ in range(50):
        middle = (low * high) ** 0.5
        if _predict_probe(cluster, measured.probe, eager_passes=middle) < seconds:
            low = middle
        else:
            high = middle
    return _change_efficiency(cluster, eager_passes=(low * high) ** 0.5)


def _fit_layers(cluster: Cluster, measured: Measured) -> Cluster:
    """Find what predicts all probes best: passes of element-wise kernels, the host per kernel and per step.

    Predicted seconds are linear in these three on a CPU, so that they are solved for, by least squares. The square of
    an error counts in parts of the step's seconds: a disturbed short step must not decide what tokens cost. None of
    the three is below 0. Where products by themselves take longer than steps do, their rate is solved for in place of
    the passes.
    """
    import torch

    e, none = cluster.gpu.efficiency, {"eager_passes": 0.0, "eager_us": 0.0, "eager_step_ms": 0.0}
    seconds = torch.tensor([probe[-1] for probe in measured.probes], dtype=torch.float64)
    unit = seconds.sqrt()

    def predict_all(**changes: float) -> torch.Tensor:
        each = [_predict_probe(cluster, probe, **none | changes) for probe in measured.probes]
        return torch.tensor(each, dtype=torch.float64)

    least = predict_all()
    columns = {name: predict_all(**{name: 1.0}) - least for name in none}
    products = predict_all(gemm=e.gemm / 2, attention=e.attention / 2) - least  # half the rate takes twice as long
    best, chosen = float("inf"), dict(none)
    for names in (("eager_us", "eager_step_ms"), ("eager_us",), ("eager_step_ms",), ()):
        for name in ("eager_passes", "gemm", ""):
            known = least - products * (name == "gemm")
            free = {own: columns.get(own, products) for own in (*names, name) if own}
            if not free:
                continue
            slopes, rest = torch.stack(list(free.values()), 1) / unit[:, None], (seconds - known) / unit
            found = torch.linalg.lstsq(slopes, rest[:, None], driver="gelsd").solution[:, 0]
            error = float((slopes @ found - rest).square().sum())
            if bool((found > 0).all()) and error < best * (1 - 1e-9):
                best, chosen = error, none | dict(zip(free, found.tolist(), strict=True))
    scale = chosen.pop("gemm", 1.0)
    return _change_efficiency(cluster, gemm=e.gemm / scale, attention=e.attention / scale, **chosen)


def _fit_host(cluster: Cluster, measured: Measured) -> Cluster:
    """Find the host's time per kernel and per step beside a GPU, which waits for it in steps as small as the probes.

    Two depths tell them apart; of one probe alone the catalogue's numbers stay. Probes tell nothing of GPU kernels.
    """
    if len(measured.probes) < 2:
        return cluster
    shallow, deep = measured.probes[:2]
    launched = [_predict_probe(cluster, probe, eager_us=1e9, eager_step_ms=0.0) / 1e3 for probe in (shallow, deep)]
    each = (deep[-1] - shallow[-1]) / (launched[1] - launched[0])  # by a host that takes 1,000 seconds for a kernel
    if each <= 0:
        return cluster
    return _change_efficiency(
        cluster, eager_us=each * 1e6, eager_step_ms=max(0.0, shallow[-1] - launched[0] * each) * 1e3
    )


def _change_efficiency(cluster: Cluster, **changes: float) -> Cluster:
    efficiency = dataclasses.replace(cluster.gpu.efficiency, **changes)
    return dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, efficiency=efficiency))


def _predict_probe(cluster: Cluster, probe: tuple[dict[str, int], int, int, float], **changes: float) -> float:
    """Return the seconds of a probe's step on a cluster with other efficiencies."""
    numbers, rows, tokens, _ = probe
    job = make_job(Layout(), tokens, rows, rows, precision="fp32", optimizer="adamw", engine="hf_parallel")
    alone = dataclasses.replace(_change_efficiency(cluster, **changes), gpus=1, per_node=1)
    return predict_step(shape_of(numbers), alone, Layout(), job).step_time_s


# ---- steps of finished runs -----------------------------------------------------------------------------------------


def remember_step(
    found: Calibration,
    shape: ModelShape,
    config: ParallelConfig,
    batch: Mapping[str, object],
    seconds: float,
    date: str,
) -> None:
    """Note what a step took; a later run of the same model, layout and batch replaces it.

    Args:
        batch: `rows` and `calls` of a data rank, `seq`, `precision`.
    """
    own = {"model": _make_model_key(shape), "spec": config.to_spec(), "batch": dict(batch), "world": config.world_size}
    kept = [step for step in found.steps if {key: step.get(key) for key in own} != own]
    found.steps = [*kept, {**own, "step_time_s": seconds, "date": date}][-_MOST_STEPS:]


def find_measured_step(
    found: Calibration | None, shape: ModelShape, config: ParallelConfig, batch: Mapping[str, object]
) -> float | None:
    """Return the seconds that a step of this model, layout and batch took here, if one ran."""
    for step in reversed([] if found is None else found.steps):
        if step.get("model") != _make_model_key(shape) or step.get("batch") != dict(batch):
            continue
        with contextlib.suppress(ValueError, KeyError, TypeError):
            measured, asked = (
                (
                    list_sizes_of(one),
                    (one.pipeline_schedule, one.pipeline_split) if one.pp_size > 1 else (),
                    (one.activation_checkpointing, one.offload, one.precision, one.compile),
                )  # how a run is watched or saved takes no time
                for one in (ParallelConfig.parse(step["spec"]).resolve(step["world"]), config)
            )
            if measured == asked:
                return float(step["step_time_s"])
    return None


def _make_model_key(shape: ModelShape) -> str:
    return f"{shape.name}, {shape.layers} layers, {shape.parameters} parameters"
