"""The gradient noise scale of gradients whose noise is known, and what is said of it."""

import pytest
import torch

from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.monitor.noise import NoiseScale, StepSums, describe_critical_batch
from hf_parallel.monitor.report_facts import Facts, list_advice

DIMS, SIGMA, STEPS = 50, 3.0, 4000


def quadratic(sizes, decay=1 - 1e-6):
    """Loss |w - x|² / 2 of samples x around 0 with variance SIGMA² per dim, at |w|² = DIMS: G² and S are known."""
    torch.manual_seed(0)
    scale, weights, total = NoiseScale(decay), torch.ones(DIMS), sum(sizes)
    for _ in range(STEPS):
        means = [weights - SIGMA * torch.randn(size, DIMS).mean(0) for size in sizes]
        added = [size / total * mean for size, mean in zip(sizes, means, strict=True)]
        squares = sum(float(one.square().sum()) / size for size, one in zip(sizes, added, strict=True))
        whole = float(sum(added).square().sum())
        scale.add(StepSums(squares, len(sizes), total, total / 4, whole))
    return scale.estimate


@pytest.mark.parametrize("sizes", [(4, 4), (11,) * 3, (2, 33, 7, 1)])
def test_known_noise(sizes):
    """Unbiased for small batches of unlike sizes too: S = DIMS SIGMA², G² = DIMS, their ratio SIGMA² in samples."""
    found = quadratic(sizes)
    assert found.noise == pytest.approx(DIMS * SIGMA**2, rel=0.02)
    assert found.signal == pytest.approx(DIMS, rel=0.02)
    assert found.in_targets == pytest.approx(SIGMA**2, rel=0.03)
    assert found.in_sequences == pytest.approx(SIGMA**2 / 4, rel=0.03)  # four samples are a sequence


def test_what_shows_nothing():
    """One small batch shows nothing; more noise than gradient shows no scale."""
    scale = NoiseScale()
    scale.add(StepSums(1.0, 1.0, 8.0, 2.0, 1.0))
    assert scale.estimate is None
    scale.add(StepSums(1.0, 2.0, 8.0, 2.0, 1.0))
    assert scale.estimate.signal < 0
    assert scale.estimate.in_sequences is None


def test_smoothing():
    """Numerator and denominator are smoothed apart, without a bias toward the start."""
    scale = NoiseScale(decay=0.5)
    scale.add(StepSums(0.25, 2.0, 8.0, 2.0, 1.5))
    first = scale.estimate
    assert (first.noise, first.signal) == (pytest.approx(4.0), pytest.approx(1.0))
    scale.add(StepSums(0.5, 2.0, 8.0, 2.0, 3.0))
    second = scale.estimate
    assert second.noise == pytest.approx((4 + 2 * 8) / 3)
    assert second.signal == pytest.approx((1 + 2 * 2) / 3)


def test_what_is_said():
    said = describe_critical_batch(96.0, 32)
    assert "about 96 sequences" in said
    assert "steps of 32 take 4 times" in said
    assert "1.33 times" in said


def test_the_page_names_it():
    """The newest log that can tell, beside the batch of the run."""
    logs = [{"noise": {"sequences": 12.0}}, {"noise": {"sequences": 96.0}}, {"noise": {"sequences": None}}]
    facts = Facts("out", metrics=logs, layout={"global_batch": 32})
    assert list_advice(facts) == [f"T{describe_critical_batch(96.0, 32)[1:]}."]
    assert list_advice(Facts("out", layout={"global_batch": 32})) == []


@pytest.mark.parametrize("spec", ["noise", "full+noise", "trace:3+noise", "basic+noise"])
def test_what_goes_together(spec):
    config = ParallelConfig.parse(f"monitor={spec}")
    assert config.measures_noise
    assert config.parts_waits == ("full" in spec)
    assert config.traced_steps == 3 * ("trace" in spec)
    assert not ParallelConfig.parse("monitor=full").measures_noise


@pytest.mark.parametrize(
    ("spec", "named", "works"),
    [
        ("monitor=noise+off", "noise+off", "monitor=trace:4"),
        ("monitor=basic+full", "basic+full", "monitor=trace:4"),
        ("monitor=noise+noise", "noise+noise", "monitor=trace:4"),
        ("monitor=noise,ep=2,dp_shard=2", "ep_size=2", "ep_size=1"),
        ("monitor=noise,cp=2,tp=2", "tp_size=2", "tp_size=1"),
        ("monitor=noise,cp=2,pp=2", "pp_size=2", "pp_size=1"),
        (
            "monitor=noise,cp=2,quantize_gradients=int8,dp_shard=2",
            "quantize_gradients=int8",
            "quantize_gradients=none",
        ),
        ("monitor=noise,pp=2,dp_shard=1,pipeline_schedule=pipedream_2bw", "pipedream_2bw", "pipeline_schedule=1f1b"),
    ],
)
def test_refused(spec, named, works):
    with pytest.raises(SpecError) as refused:
        ParallelConfig.parse(spec)
    assert named in str(refused.value)
    assert works in str(refused.value)
    key = works.partition("=")[0]
    kept = [part for part in spec.split(",") if key.removesuffix("_size") != part.partition("=")[0]]
    ParallelConfig.parse(",".join([*kept, works]))
