"""Layouts on pretended CUDA devices and NCCL: the numbers of one process, no NaN, no more waits than said, no race.

A test per group of layouts, so that a plain run shows one of each group and every pair of axes; `--all` shows all.
The table of all of them: `python -m tests.cuda`.
"""

from __future__ import annotations

import pytest

from tests.cuda import layouts

pytestmark = pytest.mark.timeout(600)  # the first compiles the device


def of(group: list[layouts.Layout]):
    """Parametrise over a group's layouts; `spec` is what the selection looks at."""
    cases = [pytest.param(layout.name, layout.spec, id=layout.name) for layout in group]
    return pytest.mark.parametrize(("name", "spec"), cases)


def check(worker, name: str) -> None:
    wrong = worker.row(name)["wrong"]
    assert not wrong, "\n".join(wrong)


@of(layouts.DATA)
def test_data_parallelism(worker, name, spec):
    check(worker, name)


@of(layouts.COMPRESSED)
def test_compressed_transfers(worker, name, spec):
    check(worker, name)


@of(layouts.OFFLOAD)
def test_offloading(worker, name, spec):
    check(worker, name)


@of(layouts.TENSOR)
def test_tensor_parallelism(worker, name, spec):
    check(worker, name)


@of(layouts.RECOMPUTED)
def test_recomputation(worker, name, spec):
    check(worker, name)


@of(layouts.PIPELINE)
def test_pipelines(worker, name, spec):
    check(worker, name)


@of(layouts.CONTEXT)
def test_context_parallelism(worker, name, spec):
    check(worker, name)


@of(layouts.EXPERTS)
def test_experts(worker, name, spec):
    check(worker, name)


@of(layouts.COMPILED)
def test_compiled_layers(worker, name, spec):
    check(worker, name)


@of(layouts.ADAPTERS)
def test_adapters(worker, name, spec):
    check(worker, name)


@of(layouts.PRECISION)
def test_precision(worker, name, spec):
    check(worker, name)


@of(layouts.OPTIMIZERS)
def test_optimizers(worker, name, spec):
    check(worker, name)
