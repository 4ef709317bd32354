"""Libraries of another version: refused by name before anything is changed, or told about."""

import importlib.metadata
import json

import pytest
import torch

from hf_parallel import ParallelConfig, SpecError
from hf_parallel.hooks import patching
from hf_parallel.hooks.patching import Patch, apply, check_torch, check_versions
from hf_parallel.parallelize import check_overlap


@pytest.fixture
def versions(monkeypatch):
    """`versions(torch="2.10.0")`: what is installed, as far as anybody can tell."""
    real = importlib.metadata.version

    def pretend(**found):
        monkeypatch.setattr(importlib.metadata, "version", lambda package: found.get(package) or real(package))

    return pretend


@pytest.mark.parametrize("package", sorted(patching.CHECKED))
def test_only_known_versions_go_on(versions, monkeypatch, package):
    if package in patching.OPTIONAL:
        pytest.importorskip(package)
    first, last = patching.CHECKED[package]
    major, minor = map(int, last.split("."))
    for found in (f"{first}.0", f"{last}.7", f"{last}.1.dev0"):
        versions(**{package: found})
        check_versions()
    for found in ("4.57.1" if package == "transformers" else "0.1.0", f"{major}.{minor + 1}.0"):
        versions(**{package: found})
        with pytest.raises(SpecError, match=f"{package} {found} is not known .*{first} to {last}"):
            check_versions()
        with pytest.raises(SpecError):
            apply([Patch("json:dumps", lambda original: None, "never"), Patch(f"{package}:x", None, "", late=False)])
        assert json.dumps(1) == "1"
        with monkeypatch.context() as allowed:
            allowed.setenv(patching.ALLOW_UNKNOWN, "1")
            check_versions()


def test_a_target_that_is_gone_undoes_the_rest():
    patches = [Patch("json:dumps", lambda original: lambda value: "?", ""), Patch("json:no_such_thing", None, "")]
    with pytest.raises(SpecError, match="json:no_such_thing does not exist"):
        apply(patches)
    assert json.dumps(1) == "1"


def test_torch(versions, monkeypatch):
    for found in ("2.11.0", "2.11.0+cu130", "2.13.1"):
        versions(torch=found)
        assert check_torch() is None
    versions(torch="2.15.0")
    assert check_torch() == "torch 2.15.0 is newer than those this version was checked on (2.11 to 2.13)"
    versions(torch="2.10.1")
    with pytest.raises(SpecError, match="torch 2.10.1 is too old; torch 2.11 to 2.13 work"):
        check_torch()


def test_overlap_before_torch_2_13(monkeypatch):
    asked = ParallelConfig.parse("tp=2,pp=2,tp_overlap=true,pipeline_schedule=zbv_zero_bubble")
    check_overlap(asked)
    monkeypatch.setattr(torch, "__version__", "2.12.0")
    with pytest.raises(SpecError, match="tp_overlap=true with pipeline_schedule=zbv_zero_bubble needs torch 2.13"):
        check_overlap(asked)
    check_overlap(ParallelConfig.parse("tp=2,pp=2,tp_overlap=true,pipeline_schedule=1f1b"))
    check_overlap(ParallelConfig.parse("tp=2,pp=2,pipeline_schedule=zbv_zero_bubble"))
