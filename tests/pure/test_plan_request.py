"""The arguments of `pfeife plan`, checked against each other."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.tools.plan_request import PlanRequest, add_arguments


def request(*words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return PlanRequest.of(parser.parse_args(words))


MODEL = ("vit", "--machine", "h100", "--ranks", "8", "--batch", "96")
GRAPH = ("--graph", "a.json.gz", "--ranks", "4", "--microbatches", "8")


def test_a_graph():
    asked = request(*GRAPH, "--memory", "38GiB", "--schedule", "1f1b", "--backward", "split", "--out", "plan.json")
    assert (asked.graph, asked.num_ranks, asked.num_microbatches) == (Path("a.json.gz"), 4, 8)
    assert (asked.memory_bytes, asked.schedule, asked.backward) == (38 * 2**30, "1f1b", "split")
    assert (asked.recompute, asked.effort, asked.out) == ("none", "full", Path("plan.json"))


def test_a_model():
    asked = request(*MODEL, "--set", "num_layers=4", "--set", "act=gelu", "--set", "dims=[1, 2]")
    assert (asked.model, asked.machine, asked.batch, asked.num_microbatches) == ("vit", "h100", 96, None)
    assert (asked.dtype, asked.ranks_per_host, asked.num_replicas) == ("fp32", 8, 1)
    assert asked.overrides == (("num_layers", 4), ("act", "gelu"), ("dims", [1, 2]))
    assert request(*MODEL, "--replicas", "auto").num_replicas is None
    assert request(*MODEL, "--replicas", "4").num_replicas == 4


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--ranks", "4"), "PF140 pfeife plan takes either MODEL or --graph FILE\n  why    neither was given"),
        ((*GRAPH, "vit"), "PF140 pfeife plan takes either MODEL or --graph FILE\n  why    both were given"),
        (("--graph", "a.json", "--ranks", "4"), "PF140 pfeife plan --graph needs --microbatches"),
        (("vit", "--ranks", "4"), "PF140 pfeife plan MODEL needs --machine and --batch"),
        ((*GRAPH, "--batch", "8"), "PF141 --batch with --graph\n  why    the file says it already"),
        ((*GRAPH, "--set", "a=1"), "PF141 --set with --graph"),
        ((*GRAPH, "--ranks-per-host", "4"), "PF141 --ranks-per-host with --graph"),
        (("vit", "--machine", "h100", "--batch", "9", "--ranks", "0"), "PF141 --ranks 0\n  why    it is at least 1"),
        ((*MODEL, "--resolution", "-1"), "PF141 --resolution -1"),
        ((*MODEL, "--microbatches", "97"), "PF141 --microbatches 97 of 96 rows"),
        ((*MODEL, "--microbatches", "96", "--replicas", "2"), "PF141 --microbatches 96 of 48 rows"),
        ((*MODEL, "--memory-fraction", "1.5"), "PF141 --memory-fraction 1.5"),
        ((*MODEL, "--replicas", "many"), "PF141 --replicas many\n  why    it is a number of pipelines, or auto"),
        ((*MODEL, "--replicas", "3"), "PF141 --replicas 3 with --ranks 8\n  why    replicas have equally many ranks"),
        (("vit", "--machine", "h100", "--ranks", "8", "--batch", "9", "--replicas", "2"),
         "PF141 --replicas 2 with --batch 9\n  why    replicas have equally many rows"),
        ((*MODEL, "--set", "layers"), "PF142 --set layers has no value\n  try    --set num_hidden_layers=4"),
        ((*GRAPH, "--memory", "much"), "PF138 'much' is not a number of bytes"),
    ],
)  # fmt: skip
def test_what_means_nothing_is_refused(words, text):
    with pytest.raises(PfeifeError) as failure:
        request(*words)
    assert text in str(failure.value)
