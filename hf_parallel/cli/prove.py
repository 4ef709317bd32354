"""`hf-parallel prove`: run the user's own script small, in one process and under a layout, and compare.

Exit codes: 0 if every number is one process's; 1 if one differs; 2 if the script cannot be proved, with the reason.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hf_parallel.ask.config import AUTO, ParallelConfig, SpecError, choose_spec
from hf_parallel.ask.spec import check_model_name, refuse

if TYPE_CHECKING:
    from hf_parallel.prove.compare import Compared
    from hf_parallel.prove.locate import Place
    from hf_parallel.prove.processes import Failure, ForkedRun
    from hf_parallel.prove.record import Record

#: What the two references are called.
ALONE, DISTURBED = "one process", "one process, rounded otherwise"
#: What a script says where nobody has launched it that reads a launcher's variables, or joins its processes.
_LACKS_A_LAUNCHER = re.compile(
    r"KeyError: '(LOCAL_|)(RANK|WORLD_SIZE)'|environment variable \w+ expected, but not set"
)
#: The script that trains a model on generated examples.
_OF_A_MODEL = "hf_parallel.cli.prove_model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `hf-parallel prove`."""
    parser.description = "Run a script with a small model, in one process and under a layout, and compare the numbers."
    parser.add_argument("--parallel", metavar="SPEC", help="key=value,… such as tp=2,pp=2; a YAML file; or auto")
    parser.add_argument("--num_processes", "--nproc", type=int, metavar="N", help="for auto and a size of -1")
    parser.add_argument("--gpu", metavar="NAME", help="for auto: a GPU such as h100-80gb; default: this machine's")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="optimizer steps, 3 or more (4)")
    parser.add_argument("--saved_by", metavar="SPEC", help="resume from a checkpoint that this layout saved")
    parser.add_argument("--dtype", choices=("fp32", "own"), default="fp32", help="fp32 (default), or the script's own")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cpu (default), or these GPUs")
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="time limit of each run (600)")
    parser.add_argument("--out", default="prove.json", metavar="FILE", help="file to write the result to (prove.json)")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the files of the runs here")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module")
    parser.add_argument("script", metavar="SCRIPT", help="a training script, or a model (with generated examples)")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own arguments")


def prove(args: argparse.Namespace) -> int:
    """Prove a script under a layout, print the verdict, and write the certificate."""
    try:
        config, saved_by = _read_layouts(args)
        if not args.module and not args.script.endswith(".py"):  # a model: a folder, its config.json, or a Hub id
            args.module, args.arguments = True, [args.script, *args.arguments]
            args.script = _OF_A_MODEL
        if not args.module and not os.path.isfile(args.script):
            refuse(args.script, "no such script", do="give the path of a training script")
        if args.steps < 3:
            refuse(f"--steps {args.steps}", "needs an epoch with a full and a ragged step, and one more", "--steps 4")
        if args.script == _OF_A_MODEL:  # before anything is imported
            offline = None if os.environ.get("HF_HUB_OFFLINE", "1") == "0" else "a proof downloads nothing"
            otherwise = "load it once, or give a folder with a config.json"
            check_model_name(args.arguments[0], otherwise, offline=offline, needs_weights=False)
        if any(argument.partition("=")[0] == "--parallel" for argument in args.arguments):
            refuse("--parallel", "stands among the script's arguments", do="give it before the script")
    except SpecError as error:
        print(f"hf_parallel: {error}", file=sys.stderr)
        return 2
    if args.keep:
        own = Path(args.keep).resolve() / "hf_parallel-prove"  # former runs in it are removed
        own.mkdir(parents=True, exist_ok=True)
        return _prove_in(own, config, saved_by, args)
    folder = tempfile.mkdtemp(prefix="hf_parallel-prove-")  # a TemporaryDirectory would go with the first child
    try:
        return _prove_in(Path(folder), config, saved_by, args)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _read_layouts(args: argparse.Namespace) -> tuple[ParallelConfig | None, ParallelConfig | None]:
    """Return the layout, None if it is to be chosen, and the one that begins the run, None if that is the same."""
    chosen, config = choose_spec(args.parallel, "prove's --parallel"), None
    if chosen is None:
        refuse("prove", "needs a layout", "--parallel tp=2")
    if chosen[0] != AUTO:
        if args.gpu:
            refuse(f"--gpu {args.gpu}", "is what auto chooses for", "--parallel auto")
        config = ParallelConfig.parse(chosen[0])
        if config.pack_tokens:
            why = "fills batches by tokens: their examples are not those of one process's batches"
            refuse(f"pack_tokens={config.pack_tokens}", why, "padding_free=true")
        config = config.resolve(args.num_processes or abs(config.world_size))
    elif args.num_processes is None:
        refuse("--parallel auto", "chooses for a number of processes", "--num_processes 4")
    if args.saved_by is None:
        return config, None
    asked = f"--saved_by {args.saved_by}"
    if config is None:
        refuse(asked, "is resumed by a layout that is known", "--parallel tp=2")
    saved_by = ParallelConfig.parse(args.saved_by)
    saved_by = saved_by.resolve(abs(saved_by.world_size))
    if saved_by.pack_tokens:
        refuse(asked, "fills batches by tokens: those of other data ranks are no process's", "padding_free=true")
    few, many = sorted((saved_by.data_parallel_size, config.data_parallel_size))
    if many % few:
        refuse(asked, f"batches of {few} and of {many} data ranks cannot be equal", f"--saved_by dp_shard={many}")
    return config, saved_by


def _prove_in(
    folder: Path, config: ParallelConfig | None, saved_by: ParallelConfig | None, args: argparse.Namespace
) -> int:
    from hf_parallel.prove import certificate

    began = time.monotonic()
    try:
        devices = _prepare_process(args.device)
    except SpecError as error:
        print(f"hf_parallel: {error}", file=sys.stderr)
        return 2
    script = Script(args.script, args.arguments, args.module)
    try:
        if config is None:
            config = script.chosen_layout(folder / "auto", args.num_processes, args.gpu, args.limit, devices)
        proof = Proof(folder, config, script, args.steps, args.dtype == "own", args.limit, devices, saved_by)
        verdict = proof.judge(proof.run_layout())
    except NotProvedError as error:
        print(f"hf_parallel: not proved: {error}", file=sys.stderr)
        return 2
    seconds = time.monotonic() - began
    spec = config.to_spec() if saved_by is None else f"{config.to_spec()} resumed from {saved_by.to_spec()}"
    print(verdict.told(spec, seconds))
    facts = {**verdict.to_dict(), "seconds": round(seconds, 1)}
    try:
        certificate.write_proof(Path(args.out), args.script, spec, facts)
        print(f"hf_parallel: {args.out} has all numbers", file=sys.stderr)
    except OSError as error:
        print(f"hf_parallel: cannot write {args.out}: {error.strerror or error}; the verdict stands", file=sys.stderr)
    return 1 if verdict.compared.differences else 0


def _prepare_process(device: str) -> int:
    """Import once, with one thread, what all forked processes need: a pool of threads does not survive a fork.

    Returns how many GPUs the runs have.
    """
    for name, value in (("OMP_NUM_THREADS", "1"), ("TOKENIZERS_PARALLELISM", "false"), ("HF_HUB_OFFLINE", "1")):
        os.environ.setdefault(name, value)
    if device == "cpu":
        os.environ.update(CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="true")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a process that has started CUDA cannot fork one with CUDA
    import torch
    from torch.utils import _triton

    torch.set_num_threads(1)
    # Libraries see no GPU while they are imported. transformers imports torchao, which asks for the GPU's properties
    # where triton is installed: that would start CUDA, and a forked process could not use it.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        import hf_parallel.hooks.patches
        import hf_parallel.hooks.proving  # noqa: F401
    finally:
        _triton.has_triton.cache_clear()  # asked again by forked processes, which see GPUs
        if visible is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
    devices = torch.cuda.device_count() if device == "cuda" else 0
    if device == "cuda" and not devices:
        refuse("--device cuda", "finds no GPU on this machine", "--device cpu")
    return devices


class NotProvedError(Exception):
    """A run came to no end, so that there is nothing to compare. Its message says which one, and why.

    Args:
        refused: by name, with a value that works.
    """

    def __init__(self, message: str, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused


@dataclass
class Script:
    """The script that a user runs: a file or a module, and its arguments."""

    path: str
    arguments: list[str] = field(default_factory=list)
    is_module: bool = False

    def chosen_layout(
        self, folder: Path, processes: int, gpu: str | None, limit_s: float, devices: int = 0
    ) -> ParallelConfig:
        """Return the layout that auto chooses for so many of these GPUs, or for this machine.

        Raises:
            NotProvedError: it chooses none.
        """
        choose = functools.partial(self._choose, folder, processes, gpu, devices > 0)
        run = _fork_run("auto", folder, processes, choose, devices)
        _raise_failure(run, run.wait(limit_s))
        spec = (folder / "spec.txt").read_text()
        print(f"hf_parallel: prove: auto chooses {spec} ({run.seconds:.0f} s)", file=sys.stderr, flush=True)
        return ParallelConfig.parse(spec)

    def _choose(self, folder: Path, processes: int, gpu: str | None, on_gpu: bool, rank: int) -> None:
        from hf_parallel.hooks import proving
        from hf_parallel.planner.hardware import make_cluster
        from hf_parallel.prove.record import Record
        from hf_parallel.prove.small_run import Proving, Sizes

        cluster = make_cluster(gpu, processes) if gpu else None
        state = Proving(Sizes(keep_dtype=True), Record(rank), folder, folder / "models", on_gpu=on_gpu)
        spec = proving.choose_layout(self.path, self.is_module, self.arguments, state, cluster)
        if rank == 0:
            (folder / "spec.txt").write_text(spec)


def _fork_run(name: str, folder: Path, world: int, work: Callable[[int], None], devices: int = 0) -> ForkedRun:
    """Start the processes of a run, in a folder of its own; none of a world are one that nobody launched.

    Args:
        devices: GPUs of the run. Ranks share them where they are fewer; one process sees one.
    """
    from hf_parallel.check import links
    from hf_parallel.prove.processes import ForkedRun

    shutil.rmtree(folder, ignore_errors=True)
    # The script runs in a folder that shows everything of the current one: it reads data by relative paths, and saves
    # under new ones. An existing path leads to the user's own files, which `refuse_writes_outside` keeps.
    here, shown = os.getcwd(), folder / "work"
    shown.mkdir(parents=True)
    for entry in os.listdir(here):
        os.symlink(os.path.join(here, entry), shown / entry)
    one = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]} if devices else {}
    return ForkedRun(name, folder, work, links.make_environments(world, devices) if world else [one])


def _raise_failure(run: ForkedRun, failure: Failure | None) -> None:
    if failure is not None:
        said = run.folder / "said-0.txt"  # by the first process
        text = failure.traceback or (said.read_text(errors="replace") if said.exists() else "")
        traced = "\n".join(text.splitlines()[-12:])
        told = failure.message if failure.refused else f"{failure.message}\n{traced}"
        raise NotProvedError(f"in {run.name}, {failure.who}: {told}", failure.refused)


class Proof:
    """The three runs of one script.

    Args:
        folder: takes what the runs write.
        config: resolved.
        limit_s: seconds that each run may take.
        devices: GPUs that the runs have; 0 for CPUs.
        saved_by: the layout that begins the run; it saves after two steps, and `config` resumes.
    """

    def __init__(
        self,
        folder: Path,
        config: ParallelConfig,
        script: Script,
        steps: int = 4,
        keep_dtype: bool = False,
        limit_s: float = 600.0,
        devices: int = 0,
        saved_by: ParallelConfig | None = None,
    ) -> None:
        from hf_parallel.prove.small_run import SAVED_AFTER, Sizes

        self.folder, self.config, self.script, self.limit_s, self.devices = folder, config, script, limit_s, devices
        self.saved_by, self.sizes = saved_by, Sizes.of_layout(config, steps, keep_dtype, saved_by)
        self._begun: list[Record] = []  # by the ranks of `saved_by`
        self._checkpoint = folder / "saved" / "output" / f"checkpoint-{SAVED_AFTER}"
        (folder / "models").mkdir(parents=True, exist_ok=True)
        self._references: tuple[Record, Record] | None = None
        self._launched = False  # the one process too: the script asks for a launcher's variables

    def references(self) -> tuple[Record, Record]:
        """Return the records of one process, and of one whose rounding differs; both run at the same time, once.

        Raises:
            NotProvedError: one of them failed.
        """
        if self._references is None:
            runs = [self._start(ALONE, "alone", None), self._start(DISTURBED, "disturbed", None)]
            try:
                self._references = (self._ended(runs[0])[0], self._ended(runs[1])[0])
            except NotProvedError as error:
                if self._launched or not _LACKS_A_LAUNCHER.search(str(error)):
                    raise
                self._launched = True
                return self.references()
            finally:
                runs[1].wait(0.0)
        return self._references

    def reuse(self, references: tuple[Record, Record] | None) -> None:
        """Take the references of another proof of the same script and sizes, in the same folder."""
        self._references = references

    def run_layout(self, plant: Callable[[int], None] | None = None) -> list[Record]:
        """Return the records of all ranks of the layout.

        Args:
            plant: called on each rank before the script starts; tests put an error in place there.

        Raises:
            NotProvedError: a run failed.
        """
        self.references()
        if self.saved_by is not None:
            self._begun = self._ended(self._start(self.saved_by.to_spec(), "saved", self.saved_by, plant))
        ranks = self._ended(self._start(self.config.to_spec(), "layout", self.config, plant))
        if self._begun:  # what one process saved after as many steps is compared with it
            kept = self._checkpoint.relative_to(self.folder / "saved")
            shutil.copytree(self._checkpoint, self.folder / "layout" / kept, dirs_exist_ok=True)
        return ranks

    def judge(self, ranks: list[Record]) -> Verdict:
        """Compare the ranks of the layout with the references."""
        from hf_parallel.prove.compare import Comparison, compare_resumed
        from hf_parallel.prove.locate import AFTER_RESUMPTION, describe_suspect, find_first_place_of
        from hf_parallel.prove.small_run import SAVED_AFTER

        alone, disturbed = self.references()
        folders = self.folder / "layout", self.folder / "alone", self.folder / "disturbed"
        if self._begun:
            compared, began_wrong = compare_resumed(self._begun, ranks, alone, disturbed, SAVED_AFTER, folders)
            parted = self._begun if began_wrong else ranks
            place = find_first_place_of(parted, alone, disturbed, compared) if compared.differences else None
            cause = AFTER_RESUMPTION if compared.differences and not began_wrong else ""
            return Verdict(compared, place, cause, alone.notes, alone.facts)
        compared = Comparison(ranks, alone, disturbed).compare(folders)
        place = find_first_place_of(ranks, alone, disturbed, compared) if compared.differences else None
        cause = describe_suspect(compared, place, alone, self.sizes.data_ranks, ranks) if compared.differences else ""
        return Verdict(compared, place, cause, alone.notes, alone.facts)

    def _start(
        self, name: str, short: str, config: ParallelConfig | None, plant: Callable[[int], None] | None = None
    ) -> ForkedRun:
        work = functools.partial(self._be_process, short, config, plant)
        world = int(self._launched) if config is None else config.world_size
        return _fork_run(name, self.folder / short, world, work, self.devices)

    def _ended(self, run: ForkedRun) -> list[Record]:
        from hf_parallel.prove.record import Record

        _raise_failure(run, run.wait(self.limit_s))
        print(f"hf_parallel: prove: {run.name}: {run.seconds:.0f} s", file=sys.stderr, flush=True)
        files = sorted(run.folder.glob("record-*.pt"), key=lambda path: int(path.stem.partition("-")[2]))
        return [Record.read(file) for file in files]

    def _be_process(
        self, short: str, config: ParallelConfig | None, plant: Callable[[int], None] | None, rank: int
    ) -> None:
        from hf_parallel.hooks import proving
        from hf_parallel.prove.record import Record
        from hf_parallel.prove.small_run import Proving

        record = Record(rank)
        if config is not None:
            from hf_parallel.hooks import activation
            from hf_parallel.ranks.mesh import compute_data_rank

            activation.activate(config.to_spec(), source="prove")
            record.data_rank = compute_data_rank(config, rank)
        folder, models, disturbed = self.folder / short, self.folder / "models", short == "disturbed"
        multiply = self.sizes.data_ranks // (1 if config is None else config.data_parallel_size)
        state = Proving(self.sizes, record, folder, models, multiply, disturbed, self.devices > 0, config is None)
        state.leaves = short == "saved"
        state.resumes = self._checkpoint if short == "layout" and self.saved_by is not None else None
        if plant is not None:
            plant(rank)
        proving.run_script(self.script.path, self.script.is_module, self.script.arguments, state)
        record.write(folder / f"record-{rank}.pt")


@dataclass
class Verdict:
    """The result of a proof.

    Attributes:
        place: where the runs part.
        cause: the kind of error that the differences look like; empty where they look like none known.
        notes: how the run was made small.
        facts: of the model.
    """

    compared: Compared
    place: Place | None
    cause: str
    notes: list[str]
    facts: dict[str, str]

    def to_dict(self) -> dict[str, object]:
        """Return the verdict as values that JSON knows."""
        own = {"proved": not self.compared.differences, "model": self.facts, "notes": self.notes}
        where = {"where": self.place.words} if self.place else {}
        return {**own, **where, **({"looks_like": self.cause} if self.cause else {}), **self.compared.to_dict()}

    def told(self, spec: str, seconds: float) -> str:
        """Return the verdict in words."""
        compared = self.compared
        counted = ", ".join(f"{count} {_make_plural(kind)}" for kind, count in compared.counts.items() if count)
        lines = [f"note: {note}" for note in self.notes]
        if not compared.differences:
            closest = max(compared.worst.values(), default=0.0)
            what = f"{spec} trains with the numbers of one process: {counted}"
            lines.append(
                f"PROVED: {what}; the largest difference is {closest:.0%} of what rounding allows ({seconds:.0f} s)"
            )
            return "\n".join(lines)
        lines.append(f"DIFFERS: {spec} does not train with the numbers of one process ({counted}; {seconds:.0f} s)")
        lines.append(f"  first: {min(compared.differences, key=lambda one: one.step or 1 << 30)}")
        lines += [f"  where: {self.place.words}"] if self.place else []
        lines += [f"  looks like: {self.cause}"] if self.cause else []
        for kind in dict.fromkeys(one.kind for one in compared.differences):
            of_kind = [one for one in compared.differences if one.kind == kind]
            lines.append(f"  {_make_plural(kind)} that differ: {len(of_kind)}, such as {of_kind[0]}")
        return "\n".join(lines)


def _make_plural(kind: str) -> str:
    return f"{kind}es" if kind.endswith("s") else f"{kind}s"
