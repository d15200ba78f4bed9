"""The peers' benchmark: targets, the file of cells, the document, splits by hand. Nothing is timed here."""

from __future__ import annotations

import multiprocessing
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "zoo" / "benchmarks"))

from endurance import Endured
from even_memory import scattered_bytes
from host_cost import Measured
from peers import Turns, _parser, command_line
from peers_rank import Entry, Holdings
from peers_record import ACCUMULATION, AUTO, FIXED, PLAIN, Cell, Found, Store, surroundings
from peers_split import best_bounds
from peers_table import markdown, rows
from peers_turns import Contestant, Failure, StepRecord

PLAN = {"estimate_s": 1.7, "num_microbatches": 8, "family": "1f1b", "num_stages": 2, "peak_mb": [1, 1]}


def found(*seconds, peak_mb=(300.0, 200.0), losses=(7.0, 6.0), **more):
    return Found(seconds=seconds, losses=losses, peak_mb=peak_mb, **more)


def a_cell(model="vit", **changed):
    contestants = {
        PLAIN: found(3.0, 3.2, 3.1, peak_mb=(800.0,)),
        ACCUMULATION: found(3.9, peak_mb=(500.0,)),
        "GPipe": found(2.2, peak_mb=(350.0, 280.0)),
        "ZBV": found(2.0, peak_mb=(310.0, 310.0)),
        "DDP": found(2.1),
        FIXED: found(1.8, plan=PLAN),
        AUTO: found(1.7, plan=PLAN),
        **changed,
    }
    return Cell(
        model=model,
        rows=8,
        num_microbatches=8,
        has_batch_statistics=model == "resnet",
        found={name: value for name, value in contestants.items() if value is not None},
        failures={"DeepSpeed": "ModuleNotFoundError: No module named 'deepspeed'"},
        command="python zoo/benchmarks/peers.py --model vit",
        surroundings={"torch": "2.14.1"},
    )


def reached(cell):
    return {check.name: (pytest.approx(check.reached), check.is_met) for check in cell.checks()}


def test_targets_are_computed_from_medians():
    assert reached(a_cell()) == {
        "step over ZBV's": (1.8 / 2.0, True),
        "memory over ZBV's": (300 / 310, True),
        "speed over accumulation": (3.9 / 1.8, True),
        "auto: speed over plain": (3.1 / 1.7, True),
        "estimate's error": (1 - 1.7 / 1.8, True),
        "auto: estimate's error": (0.0, True),
    }


def test_memory_is_held_against_the_fastest_and_the_leanest_peer():
    found_ratios = reached(a_cell(GPipe=found(2.2, peak_mb=(200.0, 250.0))))
    assert found_ratios["memory over ZBV's"] == (300 / 310, True)
    assert found_ratios["memory over GPipe's"] == (300 / 250, False)


def test_steps_of_several_starts_count_together():
    first = found(1.0, 3.0, peak_mb=(100.0, 50.0), losses=(7.0, 6.0), plan=PLAN)
    both = first.and_then(found(2.0, peak_mb=(90.0, 60.0), losses=(1.0, 1.0)))
    assert both == found(1.0, 3.0, 2.0, peak_mb=(100.0, 60.0), losses=(7.0, 6.0), plan=PLAN)
    assert both.median_s == 2.0


def test_each_target_can_be_missed():
    slow = a_cell(**{FIXED: found(2.3, peak_mb=(320.0, 100.0), plan=PLAN), AUTO: found(2.0, plan=PLAN)})
    assert not any(is_met for _, is_met in reached(slow).values())


def test_the_fastest_of_data_parallel_training_is_no_pipeline_peer():
    assert a_cell(DDP=found(0.1)).best_peer == "ZBV"


def test_what_a_cell_lacks_is_not_judged():
    checks = reached(a_cell(**{FIXED: None, AUTO: None}))
    assert checks == {}


def test_the_tiny_model_has_no_targets():
    assert reached(a_cell("tiny")) == {}


def test_convolutional_models_have_a_target_of_their_own():
    auto = a_cell("unet", **{AUTO: found(1.9, plan=PLAN)})
    assert reached(auto)["auto: speed over plain"] == (3.1 / 1.9, True)
    assert reached(replace(auto, model="vit"))["auto: speed over plain"][1] is False


def test_losses_are_held_against_plain_training():
    cell = a_cell(ZBV=found(2.0, losses=(7.1, 6.0)))
    assert cell.has_right_losses("GPipe") is True
    assert cell.has_right_losses("ZBV") is False


def test_losses_of_batch_statistics_are_held_against_accumulation():
    cell = a_cell("resnet", **{PLAIN: found(3.0, losses=(6.5, 6.0))})
    assert cell.has_right_losses(FIXED) is True
    assert cell.has_right_losses("DDP") is None
    other = found(1.7, plan={**PLAN, "num_microbatches": 4}, losses=(6.8, 6.0))
    assert a_cell("resnet", **{AUTO: other}).has_right_losses(AUTO) is None
    assert a_cell("resnet", **{FIXED: other}).has_right_losses(FIXED) is None, "with other rows in a micro-batch"


def test_cells_come_back_from_the_file_as_they_were(tmp_path):
    store = Store(tmp_path / "peers.json")
    assert store.cells() == []
    later, first = a_cell("unet"), a_cell("vit")
    store.add(later)
    store.add(replace(first, rows=4))
    store.add(first)
    assert store.cells() == [first, later]


def test_splits_are_kept_beside_the_cells(tmp_path):
    store = Store(tmp_path / "peers.json")
    store.add_split("vit/8", "ZBV", (0, 3, 7))
    store.add(a_cell())
    assert store.split("vit/8", "ZBV") == (0, 3, 7)
    assert store.split("vit/4", "ZBV") is None


def test_the_document_shows_all_contestants_and_what_was_missed():
    text = markdown([a_cell(), a_cell("unet", **{FIXED: found(2.5, plan=PLAN)})])
    assert "| ZBV | 1 | 2.000 | 1.55 | 1.95 | 1.00 | 310 / 310 | right |" in text
    assert "No module named 'deepspeed'" in text
    assert "| vit | 8 | step over ZBV's | 0.900 | at most 0.97 | met |" in text
    assert "| unet | 8 | step over ZBV's | 1.250 | at most 0.97 | **missed** |" in text
    assert "1.700 s estimated, 1.800 s recorded" in text
    assert text.count("python zoo/benchmarks/peers.py --model vit") == 1


def test_every_row_has_every_column():
    assert {len(row) for row in rows(a_cell())} == {8}


def test_surroundings_tell_what_is_not_installed(tmp_path):
    told = surroundings(tmp_path)
    assert told["processor"].endswith("cores")
    (tmp_path / "deepspeed-9.9.9.dist-info").mkdir()
    (tmp_path / "deepspeed-9.9.9.dist-info" / "METADATA").write_text("Name: deepspeed\nVersion: 9.9.9\n")
    assert surroundings(tmp_path)["deepspeed"] in ("9.9.9", told["deepspeed"])


def test_splits_balance_ranks_and_then_stages():
    assert best_bounds([1, 1, 1, 3], ranks=[0, 1], num_microbatches=8, number=1) == [(0, 3, 4)]
    # Each rank has 4 either way; the first stage of the better one is shorter.
    (best,) = best_bounds([1, 3, 1, 3], ranks=[0, 1, 1, 0], num_microbatches=8, number=1)
    assert best == (0, 1, 2, 3, 4)


def test_several_splits_come_the_best_first():
    assert best_bounds([1, 1, 1, 1, 1], ranks=[0, 1], num_microbatches=4, number=2) == [(0, 2, 5), (0, 3, 5)]


def test_host_cost_needs_both_targets():
    step_s = {"pfeife_accelerate": 0.07, "1F1B": 0.1, "GPipe": 0.12}
    run = Measured(microbatches=64, step_s=step_s, failures={}, first_operation_s={4: 1e-3}, plan="")
    assert run.best_peer == "1F1B"
    assert run.reaches_targets
    assert not replace(run, first_operation_s={4: 3e-3}).reaches_targets
    assert not replace(run, step_s={**step_s, "1F1B": 0.08}).reaches_targets


def test_endurance_names_what_has_grown():
    start = Holdings(memory_mb=700.0, threads=9, descriptors=30, cpu_s=1.0)
    calm = Endured(
        steps=1000,
        early=(start,),
        late=(start,),
        early_s=0.010,
        late_s=0.010,
        early_cpu_s=(0.005,),
        late_cpu_s=(0.005,),
    )
    assert list(calm.problems()) == []
    end = Holdings(memory_mb=720.0, threads=10, descriptors=31, cpu_s=9.0)
    grown = list(replace(calm, late=(end,), late_s=0.012).problems())
    assert len(grown) == 4
    assert "20.0 MB" in grown[0]


class Pretended:
    """A contestant whose steps take as long as it says."""

    def __init__(self, name, seconds):
        self.entry, self.told_s, self.asked = Entry(name=name, maker=""), seconds, 0

    def steps(self, number):
        self.asked += number
        if self.told_s is None and self.asked > 2:
            raise Failure("gone")
        return [StepRecord(seconds=self.told_s or 1.0, loss=7.0)] * number

    def ask(self, *_):
        return []


@pytest.mark.parametrize(("full_rounds", "slow_steps"), [(0, 1), (2, 4)])
def test_peers_far_behind_do_the_full_rounds_only(full_rounds, slow_steps):
    playing = {n: Pretended(n, s) for n, s in {PLAIN: 9.0, "ZBV": 2.0, "1F1B": 2.2, "GPipe": 3.0, FIXED: 1.0}.items()}
    turns = Turns()
    for contestant in playing.values():
        turns.warm_up(contestant)
    assert turns.play(playing, rounds=4, full_rounds=full_rounds) == {}
    counts = {name: len(seconds) for name, seconds in turns.seconds.items()}
    assert counts == {PLAIN: 8, "ZBV": 8, "1F1B": 8, "GPipe": slow_steps, FIXED: 8}
    assert playing["GPipe"].asked == 2 + 3 * full_rounds, "the first step of a turn does not count"


def test_who_fails_in_a_round_is_named_and_the_others_go_on():
    playing = {"ZBV": Pretended("ZBV", None), FIXED: Pretended(FIXED, 1.0)}
    turns = Turns()
    for contestant in playing.values():
        turns.warm_up(contestant)
    assert turns.play(playing, rounds=3, full_rounds=1) == {"ZBV": "gone"}
    assert len(turns.seconds[FIXED]) == 6


def test_the_command_is_told_whole_but_for_folders_of_this_machine():
    said = [
        "--model",
        "vit",
        "--microbatches",
        "8",
        "--only",
        "plain",
        "plain accumulation",
        "--deepspeed",
        "/a/folder",
    ]
    told = command_line(_parser().parse_args(said))
    assert told.startswith("python zoo/benchmarks/peers.py --model vit --microbatches 8 --rows 8 ")
    assert told.endswith("--starts 3 --only plain 'plain accumulation' --deepspeed FOLDER")


def test_a_contestant_that_is_gone_fails_alone():
    contestant = object.__new__(Contestant)
    contestant.entry = Entry(name="ZBV", maker="")
    here, there = multiprocessing.Pipe()
    there.close()
    contestant._pipes = [here]
    with pytest.raises(Failure, match="ZBV: rank 0 is gone"):
        contestant.ask("steps", 1)


def test_memory_in_pieces_smaller_than_a_large_page_is_counted():
    table = "Node 0, zone  DMA32  3 0 1 0 0 0 0 0 1 7 9\nNode 0, zone Normal  0 1 0 0 0 0 0 0 0 2 5\n"
    assert scattered_bytes(table) == 4096 * (3 + 4 + 256 + 2)
