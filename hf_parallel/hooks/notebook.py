"""`hf_parallel.notebook_launcher`: accelerate's, with a spec. Each process it forks becomes a rank of the layout.

from hf_parallel import notebook_launcher

def train():                     # imports, model and Trainer as they are, all inside
    ...

notebook_launcher(train, num_processes=4, parallel="tp=2,pp=2")
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import cast

from hf_parallel.ask.config import AUTO, ParallelConfig, choose_spec
from hf_parallel.ask.spec import refuse
from hf_parallel.check.links import free_port
from hf_parallel.hooks import activation

_SOURCE = "notebook_launcher(parallel=…)"


def notebook_launcher(
    function: Callable[..., object],
    args: Sequence[object] = (),
    num_processes: int | None = None,
    *accelerate_args: object,
    parallel: str | ParallelConfig | None = None,
    **accelerate_options: object,
) -> None:
    """Run `function(*args)` on `num_processes` processes under a spec.

    Args:
        function: everything of the training, the model included: a device used before cannot be forked.
        num_processes: default: one per GPU; on a machine without GPUs the product of the spec's sizes.
        parallel: the spec; default: the environment's HF_PARALLEL. Without either this is accelerate's launcher.
        accelerate_args, accelerate_options: all else that `accelerate.notebook_launcher` takes, such as
            `num_nodes` or `max_restarts`. `use_port` is a free one by default.

    Raises:
        SpecError: the spec is not understood, or does not fit the processes; nothing was started.
    """
    import torch
    from accelerate import notebook_launcher as launch

    asked = parallel.to_spec() if isinstance(parallel, ParallelConfig) else parallel
    chosen = choose_spec(asked, _SOURCE)
    if chosen is None:
        return launch(function, args, num_processes, *accelerate_args, **accelerate_options)
    spec = chosen[0]
    nodes = cast(int, accelerate_options.get("num_nodes", 1))
    number = num_processes or (torch.accelerator.device_count() if torch.accelerator.is_available() else 0)
    if not number and spec == AUTO:
        refuse("notebook_launcher", "there is no GPU to count", "num_processes=4")
    if not number:  # the axis that takes what is left counts as one
        number = math.prod(size for size in ParallelConfig.parse(spec).sizes.values() if size > 0)
    if spec != AUTO:
        ParallelConfig.parse(spec).resolve(number * nodes)
    if nodes == 1 and len(accelerate_args) < 2:
        accelerate_options.setdefault("use_port", str(free_port()))  # two notebooks of one machine must not meet

    @functools.wraps(function)  # elastic's records name it
    def be_rank(*args: object) -> None:
        """Be part of the layout from before the user's function to its end."""
        several = int(os.environ.get("WORLD_SIZE", 1)) > 1
        if several and not torch.accelerator.is_available() and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # a pool of threads does not survive a fork, and N pools slow one another down
        activation.activate(spec, source=_SOURCE)
        function(*args)  # after an error groups stay open: to end them is to wait for the other ranks
        from hf_parallel.ranks.mesh import end_all_groups

        activation.deactivate()
        end_all_groups()

    return launch(be_rank, args, number, *accelerate_args, **accelerate_options)
