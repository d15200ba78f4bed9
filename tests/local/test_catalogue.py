"""Machines that are not here: what the catalogue says of them, and how measurements put it right."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields, replace

import pytest

from pfeife_accelerate.cost import calibrated, catalogue, estimate
from pfeife_accelerate.cost.link_catalogue import LINKS, Stated
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.ir import CostOrigin, OpCost, TensorSpec
from pfeife_accelerate.ir.costs import MeasurableOp, Operand, OperandRole

pytestmark = pytest.mark.local

WANTED = ("A100-40GB", "A100-80GB", "H100", "H200", "B200", "L40S", "RTX-3090", "RTX-4090", "MI300X", "CPU")


def test_the_catalogue_has_the_usual_devices():
    assert set(WANTED) <= set(catalogue.DEVICES)


def test_every_number_is_positive_and_has_a_source():
    sheets = [*catalogue.DEVICES.values(), *LINKS.values()]
    stated = [getattr(sheet, field.name) for sheet in sheets for field in fields(sheet)]
    numbers = [value for value in stated if isinstance(value, Stated)]
    assert len(numbers) > 8 * len(catalogue.DEVICES)
    assert all(number.value > 0 and len(number.source) > 10 for number in numbers)


@pytest.mark.parametrize("name", WANTED)
def test_a_device_reaches_less_than_its_data_sheet_and_half_precision_is_no_slower(name):
    sheet, spec = catalogue.DEVICES[name], catalogue.device(name)
    assert spec.flops_per_s_of("float32") < sheet.float32.value
    assert spec.flops_per_s_of("float32") <= spec.flops_per_s_of("bfloat16") == spec.flops_per_s_of("float16")
    assert spec.bytes_per_s < sheet.bytes_per_s.value
    assert spec.memory_bytes < sheet.memory_gib.value * 2**30
    assert 0 < spec.launch_s < spec.action_s < 1e-3
    assert spec.runs_ahead == (name != "CPU")


def test_tf32_is_used_where_it_is_allowed_only():
    assert catalogue.device("a100-40gb").flops_per_s_of("float32") < 19.5e12
    assert catalogue.device("a100-40gb", allow_tf32=True).flops_per_s_of("float32") > 100e12
    assert catalogue.device("cpu", allow_tf32=True) == catalogue.device("cpu")


@pytest.mark.parametrize(
    ("name", "known"),
    [("a100-40gb", "A100-40GB"), ("A100_40GB", "A100-40GB"), ("NVIDIA A100-SXM4-80GB", "A100-80GB"), ("h100", "H100"),
     ("NVIDIA H100 80GB HBM3", "H100"), ("rtx 4090", "RTX-4090"), ("AMD Instinct MI300X", "MI300X"), ("cpu", "CPU")],
)  # fmt: skip
def test_names_are_found_whatever_their_case_and_as_torch_gives_them(name, known):
    assert catalogue.device(name).name == known


def test_an_unknown_machine_or_link_is_refused_with_the_nearest_known():
    with pytest.raises(PfeifeError, match=r"PF232 no machine 'A100-40'(.|\n)*did you mean 'A100-40GB'(.|\n)*MI300X"):
        catalogue.machine("A100-40", 2)
    with pytest.raises(PfeifeError, match=r"PF232 no link 'nvlnk4'(.|\n)*did you mean 'nvlink4'"):
        catalogue.link("nvlnk4")
    with pytest.raises(PfeifeError, match=r"PF232 no machine 'abacus' in the catalogue\n(.|\n)*known: A100-40GB"):
        catalogue.machine("abacus", 2)


def test_ranks_of_one_host_have_one_kind_of_link_and_hosts_a_slower_one():
    alone = catalogue.machine("H100", 8)
    assert alone.ranks_per_host is None and alone.link_of(0, 7) == catalogue.link("nvlink4")
    hosts = catalogue.machine("H100", 16)
    assert hosts.link_of(0, 7) == catalogue.link("nvlink4")
    assert hosts.link_of(7, 8) == catalogue.link("infiniband-ndr")
    assert hosts.link_of(7, 8).bytes_per_s < hosts.link_of(0, 7).bytes_per_s
    pairs = catalogue.machine("H100", 4, ranks_per_host=2)
    assert pairs.link_of(1, 2) == catalogue.link("infiniband-ndr")


# -- calibration -------------------------------------------------------------------------------------------------------


def linear(rows, columns=4096, dtype="float32"):
    def operand(storage, role, *shape):
        spec = TensorSpec(shape=shape, dtype=dtype, requires_grad=True)
        return Operand(spec=spec, storage=storage, storage_bytes=spec.num_bytes, role=role)

    return MeasurableOp(
        key=f"linear {rows}",
        target="linear",
        reads=(operand(1, OperandRole.ACTIVATION, rows, 4096), operand(2, OperandRole.STATE, columns, 4096)),
        writes=(operand(3, OperandRole.ACTIVATION, rows, columns),),
        prepare=lambda: pytest.fail("calibration runs nothing"),
        context=nullcontext,
    )


def pointwise(elements, dtype="float32"):
    spec = TensorSpec(shape=(elements,), dtype=dtype)
    operands = [Operand(spec=spec, storage=i, storage_bytes=spec.num_bytes) for i in range(2)]
    return replace(linear(1), key=f"relu {elements}", target="relu", reads=(operands[0],), writes=(operands[1],))


OPS = [linear(4096), linear(8192), linear(16384), pointwise(1 << 26), pointwise(1 << 27), pointwise(4), pointwise(8)]


def measured_on(real, ops, origin=CostOrigin.MEASURED):
    return [(op, replace(estimate(op, real), origin=origin)) for op in ops]


def test_a_device_is_recovered_from_what_was_measured_on_it():
    stated = catalogue.device("a100-40gb")
    real = replace(stated, flops_per_s=tuple((t, 0.4 * r) for t, r in stated.flops_per_s),
                   bytes_per_s=0.6 * stated.bytes_per_s, launch_s=3 * stated.launch_s)  # fmt: skip
    found = calibrated(stated, [*measured_on(real, OPS), (None, OpCost(forward_s=0.0))])
    for op in OPS:
        assert estimate(op, found).forward_s == pytest.approx(estimate(op, real).forward_s, rel=0.05)
    assert found.flops_per_s_of("bfloat16") == pytest.approx(real.flops_per_s_of("bfloat16"), rel=0.05)
    assert (found.name, found.memory_bytes, found.action_s) == (stated.name, stated.memory_bytes, stated.action_s)


def test_one_odd_kernel_has_no_say():
    stated = catalogue.device("a100-40gb")
    measured = measured_on(stated, OPS)
    measured[0] = (measured[0][0], replace(measured[0][1], forward_s=50 * measured[0][1].forward_s))
    assert calibrated(stated, measured).flops_per_s_of("float32") == pytest.approx(stated.flops_per_s_of("float32"))


def test_what_was_not_measured_calibrates_nothing():
    stated = catalogue.device("a100-40gb")
    slow = replace(stated, bytes_per_s=stated.bytes_per_s / 9)
    assert calibrated(stated, measured_on(slow, OPS, CostOrigin.MODELLED)) == stated
    assert calibrated(stated, []) == stated
    products = [op for op in OPS if op.target == "linear"]
    assert calibrated(stated, measured_on(slow, products)).launch_s == stated.launch_s
