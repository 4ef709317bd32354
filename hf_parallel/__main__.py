"""`python -m hf_parallel [--parallel SPEC] (script.py | -m module) args…`: activate, then run the script.

Works under any launcher that sets RANK and WORLD_SIZE (torchrun, accelerate launch), under srun and mpirun. Without a
spec from `--parallel`, HF_PARALLEL or the script's own arguments nothing of Transformers or Accelerate is touched.

Exit codes: the script's own; 2 for a spec or command line that cannot work (one line, from rank 0); 1 for anything
else that the script did not catch.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import runpy
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from hf_parallel.ask import launched
from hf_parallel.ask.config import AUTO, ParallelConfig, choose_spec
from hf_parallel.cli import runner

if TYPE_CHECKING:
    from torch.distributed import Store

USAGE = "usage: python -m hf_parallel [--parallel SPEC] (script.py | -m module) args…"
#: Seconds that a rank with nothing new to say waits, so that the launcher can stop it while another one reports.
GRACE = 3.0
_REFUSED, _FAILED = "hf_parallel/refused", "hf_parallel/failed"
_READ_S = 0.5  # that other ranks have to read what rank 0 has noted
#: What Trainer reads of a checkpoint before the optimizer's state, and what only those of layouts have.
_READ_FIRST, _OF_A_LAYOUT = "trainer_state.json", "hf_parallel.json"
_LOST_PEER = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "remote process exited",
    "ncclRemoteError",
    "NCCL communicator was aborted",
    "Connection was likely closed",
)


class UsageError(Exception):
    """The runner's command line cannot be understood. Its message is one line."""


@dataclass
class Command:
    """The command line: the runner's own options, then the script and its arguments."""

    parallel: str | None
    is_module: bool
    target: str
    args: list[str]


def parse_command(argv: list[str]) -> Command:
    """Read the runner's options; everything from the script on belongs to the script.

    Raises:
        UsageError: an unknown option, or no script.
        SystemExit: `--help`.
    """
    parallel, rest = None, list(argv)
    while rest and rest[0].startswith("-"):
        option, equals, value = rest.pop(0).partition("=")
        if option in ("-h", "--help"):
            print(f"{USAGE}\n\n{__doc__}")
            raise SystemExit(0)
        if option == "--":
            break
        if option not in ("--parallel", "-m", "--module"):
            raise UsageError(f"{option}: unknown option before the script; {USAGE}")
        if not equals:
            value = rest.pop(0) if rest else ""
        if not value:
            raise UsageError(f"{option}: needs a value; {USAGE}")
        if option != "--parallel":
            return Command(parallel, True, value, rest)
        parallel = value
    if not rest:
        raise UsageError(f"no script to run; {USAGE}")
    return Command(parallel, False, rest[0], rest[1:])


def prepare(command: Command) -> None:
    """Touch Transformers and Accelerate as far as the command asks for it, and not at all if it does not."""
    if not command.is_module and not os.path.exists(command.target):
        word = command.target.isidentifier()  # python -m hf_parallel plan …
        do = f"; a script ends in .py, and a command starts with `hf-parallel {command.target}`" if word else ""
        raise UsageError(f"{command.target}: no such script{do}")
    chosen = choose_spec(command.parallel)
    if chosen is None and not any(arg.partition("=")[0] == "--parallel" for arg in command.args):
        for name in [name for name in sys.modules if name.partition(".")[0] == "hf_parallel"]:
            del sys.modules[name]  # a script that imports it on its own account gets it as if started without us
        _watch_for_checkpoints()
        return
    launched.settle_launcher()
    if _read_environment_number("WORLD_SIZE", 1) > 1:
        runner.order_sets_alike()
    from hf_parallel.hooks import activation
    from hf_parallel.hooks.trainer import flag

    flag.install_on_import()
    if _read_rank() != 0:
        runner.silence_other_ranks()
    if chosen is not None:
        spec, source = chosen
        if spec != AUTO:  # a wrong spec is refused before torch is imported
            ParallelConfig.parse(spec).resolve(_read_environment_number("WORLD_SIZE", 1))
        activation.activate(spec, source=source)


def _watch_for_checkpoints() -> None:
    """Without a layout: plain Trainer learns to read a layout's checkpoint when it opens one, and no sooner."""
    waiting = True

    def opened(event: str, arguments: tuple) -> None:
        nonlocal waiting
        if not waiting or event != "open" or os.path.basename(str(arguments[0])) != _READ_FIRST:
            return
        folder = os.path.dirname(arguments[0])
        if os.path.isfile(os.path.join(folder, _OF_A_LAYOUT)):
            waiting = False  # an audit hook stays for good
            from hf_parallel.hooks import activation

            activation.read_checkpoints(folder)

    sys.addaudithook(opened)


def run(command: Command) -> None:
    """Run the script or module as `__main__`, with the sys.argv and sys.path[0] that plain Python gives it."""
    if command.is_module:
        sys.argv = [command.target, *command.args]
        runpy.run_module(command.target, run_name="__main__", alter_sys=True)
        return
    if not getattr(sys.flags, "safe_path", False):
        path = os.path.realpath(command.target)
        sys.path[0] = path if os.path.isdir(path) else os.path.dirname(path)
    script = os.path.abspath(command.target)  # `__file__` is absolute in plain Python, and runpy keeps argv[0] equal
    sys.argv = [script, *command.args]
    runpy.run_path(script, run_name="__main__")


def main(argv: list[str] | None = None) -> None:
    """Parse, prepare, run; end every rank with one report where it belongs. Returns only in one process."""
    try:
        command = parse_command(sys.argv[1:] if argv is None else argv)
        prepare(command)
        run(command)
        if (auto := sys.modules.get("hf_parallel.hooks.auto")) is not None:
            auto.check_chosen()  # a script that showed no model ran in each process by itself: that is no success
        code = None
    except SystemExit as stop:
        if not _is_one_of_several():
            raise
        code = stop.code
    except KeyboardInterrupt as error:
        if not _is_one_of_several():
            raise
        if _read_rank() == 0:
            _print_error(error)
        _leave_groups_open()
        runner.leave_interrupted()
    except BaseException as error:
        _report_and_leave(error)
    if _is_one_of_several():
        if code not in (None, 0):
            _leave_groups_open()
        runner.end_rank(code)


def _report_and_leave(error: BaseException) -> NoReturn:
    refusal = _find_own_error(error, "hf_parallel.ask.config", "SpecError", UsageError)
    if refusal is not None:
        _report_refusal(" ".join(str(refusal).split()), alone=getattr(refusal, "alone", False))
        _leave(2)
    told, first, seen = _find_own_error(error, "hf_parallel.ask.spec", "Told"), error, set[int]()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        first, cause = cause, cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    line = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    if _has_process_group() and isinstance(first, RuntimeError) and any(text in str(first) for text in _LOST_PEER):
        time.sleep(GRACE)  # the first thing that went wrong here is that another rank was gone: that one is to read
        # The first sentence, without the C++ file and line that it begins with
        sentence = re.sub(r"^\[\S+:\d+\] ", "", " ".join(str(first).split())).split(". ")[0][:200]
        _write_to_stderr(f"hf_parallel: rank {_read_rank()} lost its peers ({sentence})\n")
    elif told is not None:
        _report_refusal(" ".join(str(told).split()).removeprefix("hf_parallel: "), alone=False)
    elif _read_rank() != 0 and _has_process_group() and _wait_for_note(_FAILED, _READ_S, gone=None) == line:
        _write_to_stderr(f"hf_parallel: rank {_read_rank()} failed, too: {line}\n")
    else:
        _write_to_stderr(f"hf_parallel: rank {_read_rank()} failed\n")
        _print_error(error)
        if _read_rank() == 0:
            _note(_FAILED, line)
    _leave(1)


def _find_own_error(error: BaseException, module: str, name: str, *others: type) -> BaseException | None:
    """Return the error made for people, in `error` or among what it was raised from.

    Args:
        module, name: a class of this package; nobody can have raised it if its module has not been imported.
    """
    kinds = (*others, getattr(sys.modules[module], name)) if module in sys.modules else others
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, kinds):
        cause = cause.__cause__
    return cause


def _print_error(error: BaseException) -> None:
    """Print the traceback, from the script on."""
    own, trace = (__file__, runpy.__file__, "<frozen runpy>"), error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    error = error.with_traceback(trace)
    sys.excepthook(type(error), error, error.__traceback__)


def _report_refusal(message: str, alone: bool) -> None:
    """Report a refusal in one line for all ranks, from rank 0; from another rank only if rank 0 refuses nothing."""
    if _read_rank() == 0:
        _write_to_stderr(f"hf_parallel: {message}\n")
        _note(_REFUSED, "1")
        return
    if alone:
        told = False
    elif _has_process_group():  # a launcher kills all ranks as soon as the first one is gone: rank 0 writes first
        told = _wait_for_note(_REFUSED, GRACE, gone="1") is not None
    else:
        time.sleep(GRACE)
        # Before the first collective every rank refuses the same thing, but for files that only its machine lacks.
        told = os.environ.get("LOCAL_RANK") != "0"
    if not told:
        _write_to_stderr(f"hf_parallel: rank {_read_rank()}: {message}\n")


def _note(key: str, text: str) -> None:
    """Let the other ranks know, which are waiting for it if the same has happened to them."""
    if _has_process_group():
        with contextlib.suppress(RuntimeError):
            _store().set(key, text)
            time.sleep(_READ_S)  # the store may end with this process


def _wait_for_note(key: str, seconds: float, gone: str | None) -> str | None:
    """Return what rank 0 has noted within these seconds; `gone` if it, or its launcher, has ended."""
    end = time.monotonic() + seconds
    try:
        while not _store().check([key]):  # `wait` would warn about its time-out
            if time.monotonic() > end:
                return None
            time.sleep(0.05)
        return _store().get(key).decode()
    except RuntimeError:
        return gone


def _leave(code: int) -> NoReturn:
    """End now. With other ranks around, without destructors: they may wait for a peer that is gone."""
    if _read_environment_number("WORLD_SIZE", 1) == 1:
        sys.exit(code)
    if "multiprocessing" in sys.modules:
        # Workers of a data loader hold copies of this process's connections: no peer sees them close while they live.
        for child in sys.modules["multiprocessing"].active_children():
            child.terminate()
    _leave_groups_open()
    runner.leave_now(code)


def _is_one_of_several() -> bool:
    """Return whether this process is part of a layout."""
    activation = sys.modules.get("hf_parallel.hooks.activation")
    return activation is not None and activation.is_active()


def _leave_groups_open() -> None:
    """Leave the groups of a failed rank open: ending them would wait for work that its peers may never do."""
    mesh = sys.modules.get("hf_parallel.ranks.mesh")
    if mesh is not None:
        atexit.unregister(mesh.end_all_groups)
    if "hf_parallel.ranks.desync" in sys.modules:
        sys.modules["hf_parallel.ranks.desync"].expect_nothing()


def _has_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _store() -> Store:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def _read_rank() -> int:
    return _read_environment_number("RANK", 0)


def _read_environment_number(name: str, otherwise: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else otherwise


def _write_to_stderr(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


if __name__ == "__main__":
    main()
