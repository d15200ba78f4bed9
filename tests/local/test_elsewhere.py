"""A parameter elsewhere in one process, with a source that holds the owner's value."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from pfeife_accelerate.capture.elsewhere import DataElsewhere, GradientElsewhere, ParameterElsewhere
from pfeife_accelerate.capture.elsewhere_place import Edit, Place
from pfeife_accelerate.errors import PfeifeError

pytestmark = pytest.mark.local


class Owner:
    """Another rank that has the values, and what this rank's script has made of them."""

    device = torch.device("cpu")

    def __init__(self, **values: torch.Tensor) -> None:
        self.values = values
        self.reads: list[str] = []
        self.edits: list[tuple[str, bool]] = []
        self.asked: list[int] = []
        self.hides_gradients = False
        self.reads_later = False

    def value(self, name: str) -> torch.Tensor:
        self.reads.append(name)
        return self.values[name].clone()

    def overwrite(self, name: str, value: torch.Tensor) -> None:
        self.values[name] = value

    def edit(self, name: str, edit: Edit | None, what: str, *, repeatable: bool) -> None:
        self.edits.append((what.split("`")[1], repeatable))
        if edit is not None:
            edit(self.values[name])

    def gradient(self, name: str, edits: int) -> torch.Tensor:
        self.asked.append(edits)
        return torch.full((2, 3), 0.5)

    def rank_of(self, name: str) -> int:
        return 3


@pytest.fixture
def value() -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3) - 2


@pytest.fixture
def owner(value: torch.Tensor) -> Owner:
    return Owner(weight=value.clone())


@pytest.fixture
def parameter(owner: Owner, value: torch.Tensor) -> nn.Parameter:
    real = nn.Parameter(value.clone())
    real.note = "kept"  # type: ignore[attr-defined]
    identity = id(real)
    torch.utils.swap_tensors(real, ParameterElsewhere.of(real, Place("weight", owner)))
    assert id(real) == identity and type(real) is ParameterElsewhere
    return real


def test_metadata_costs_no_read(parameter, owner):
    assert isinstance(parameter, nn.Parameter)
    assert parameter.is_meta and parameter.device == torch.device("cpu") and not parameter.is_cuda
    assert (parameter.shape, parameter.dtype, parameter.numel(), len(parameter)) == ((2, 3), torch.float32, 6, 2)
    assert (parameter.ndim, parameter.stride(), parameter.nbytes, parameter.get_device()) == (2, (3, 1), 24, -1)
    assert parameter.requires_grad and parameter.is_leaf and parameter.grad_fn is None and parameter.grad is None
    assert parameter.note == "kept"
    assert parameter in {parameter} and {parameter: 1}[parameter] == 1
    assert not parameter.requires_grad_(False).requires_grad
    parameter.requires_grad = True
    assert parameter.requires_grad
    other = ParameterElsewhere.of(nn.Parameter(torch.zeros(2, 3)), Place("other", owner))
    assert parameter.data_ptr() == parameter.data.data_ptr() != other.data_ptr()
    for like in (torch.zeros_like(parameter), torch.empty_like(parameter), parameter.new_zeros(2, 3)):
        assert type(like) is torch.Tensor and not like.is_meta and like.shape == (2, 3)
    assert torch.zeros(6).view_as(parameter).shape == (2, 3)
    assert nn.Linear(3, 2).to(parameter.device).weight.device == torch.device("cpu")
    assert owner.reads == []


def test_reads_are_of_the_owners_value(parameter, value, owner):
    for found, wanted in (
        (parameter.detach(), value), (parameter.data.clone(), value), (parameter.clone(), value),
        (parameter.cpu(), value), (parameter.double(), value.double()), (parameter + 1, value + 1),
        (1 - parameter, 1 - value), (parameter[0], value[0]), (parameter.T, value.T), (parameter.norm(), value.norm()),
        (torch.zeros(2, 3).lerp_(parameter.data, 0.5), value / 2), (torch.stack([parameter.data, value])[0], value),
        (torch.add(value, parameter.detach()), 2 * value), (torch.max(parameter, dim=1).values, value.max(1).values),
        (nn.utils.parameters_to_vector([parameter]), value.flatten()), (next(iter(parameter)), value[0]),
        (torch._foreach_sub([value], [parameter])[0], torch.zeros(2, 3)),
    ):  # fmt: skip
        assert not isinstance(found, ParameterElsewhere | DataElsewhere) and not found.is_meta
        torch.testing.assert_close(found.detach(), wanted)
    assert parameter.sum().item() == value.sum() and parameter.tolist() == value.tolist()
    assert parameter.data.numpy().sum() == value.sum() and bool((parameter == value).all())
    assert repr(parameter) == repr(nn.Parameter(value)) and str(parameter.data) == str(value)
    for name in owner.reads:
        assert name == "weight"


def test_copies_and_pickles_are_ordinary(parameter, value):
    file = io.BytesIO()
    torch.save({"parameter": parameter, "data": parameter.data}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert type(loaded["parameter"]) is nn.Parameter and type(loaded["data"]) is torch.Tensor
    for found in (*loaded.values(), copy.deepcopy(parameter), pickle.loads(pickle.dumps(parameter))):
        assert torch.equal(found.detach(), value) and not found.is_meta
    assert type(copy.deepcopy(parameter)) is nn.Parameter
    pair = copy.deepcopy([parameter, parameter])
    assert pair[0] is pair[1]


def test_a_penalty_leaves_the_gradient_to_the_owner(parameter, value):
    own = nn.Parameter(torch.ones(2, 3))
    loss = (own * parameter).sum() + parameter.square().sum()
    loss.backward()
    torch.testing.assert_close(own.grad, value)
    assert type(parameter.grad) is GradientElsewhere
    with torch.no_grad():
        assert not (parameter * 2).requires_grad
    assert not parameter.requires_grad_(False).norm().requires_grad
    with torch.inference_mode():
        assert parameter.norm() == value.norm()


def test_changes_are_seen_here(parameter, owner):
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place operation"):
        parameter.mul_(2)
    with torch.no_grad():
        assert parameter.copy_(torch.ones(3)) is parameter
    assert torch.equal(parameter.detach(), torch.ones(2, 3))
    reads = len(owner.reads)
    parameter.data.fill_(4.0)
    parameter.data = torch.full((2, 3), 5.0)
    torch.nn.init.constant_(parameter, 6.0)
    torch.nn.init.xavier_uniform_(parameter)
    torch._foreach_copy_([parameter.data, torch.zeros(1)], [torch.full((2, 3), 7.0), torch.ones(1)])
    torch.mul(torch.full((2, 3), 4.0), 2, out=parameter.data)
    assert len(owner.reads) == reads, "what is overwritten need not be fetched"
    assert torch.equal(parameter.detach(), torch.full((2, 3), 8.0))
    parameter.data.clamp_(-1, 1)
    parameter.data[0] = 0.5
    parameter.data.mul_(2)
    parameter.data += 1
    assert owner.edits == [("clamp_", True), ("__setitem__", True), ("mul_", False), ("add_", False)]
    assert parameter.tolist() == [[2.0] * 3, [3.0] * 3]
    real = nn.Parameter(torch.ones(2, 3))
    torch._foreach_mul_([real.data, parameter.data], 3.0)
    assert parameter.sum() == 45 and real.sum() == 18
    nn.utils.vector_to_parameters(torch.ones(12), [real, parameter])
    assert parameter.sum() == 6


def test_a_module_is_converted_without_reading(parameter, owner, value):
    module = nn.Linear(3, 2, bias=False)
    module.weight = parameter
    parameter.place.has_gradient = True
    module.half().to("cpu")
    assert module.weight is parameter and parameter.dtype == torch.float16 and parameter.grad.dtype == torch.float16
    module.to(torch.float64)
    assert module.weight is parameter and parameter.dtype == torch.float64 and owner.reads == []
    assert torch.equal(owner.values["weight"], value)


EDITS = [
    lambda g: g.mul_(2), lambda g: g.clamp_(-1, 1), lambda g: g.div_(2), lambda g: g.add_(torch.ones(2, 3)),
    lambda g: g.data.mul_(2), lambda g: g.detach_(), lambda g: g.detach().mul_(2), lambda g: g.copy_(torch.ones(2, 3)),
    lambda g: torch.clamp_(g, -1, 1), lambda g: g.__setitem__(0, 1.0), lambda g: torch._foreach_mul_([g], 2.0),
    lambda g: g.requires_grad_(False), lambda g: g.to("cpu").mul_(2),
]  # fmt: skip

READS = [
    lambda g: g.norm(), lambda g: g.sum().item(), lambda g: torch.isnan(g).any(), lambda g: g.clone(), lambda g: g * 2,
    lambda g: torch.zeros(2, 3).add_(g), lambda g: torch.stack([g]), lambda g: g.tolist(), lambda g: bool(g.any()),
    lambda g: torch._foreach_norm([torch.ones(1), g]), lambda g: copy.deepcopy(g),
    lambda g: pickle.loads(pickle.dumps(g)),
    lambda g: nn.utils.get_total_norm([torch.ones(1), g]), lambda g: g[0].mul_(2),
]  # fmt: skip


def test_a_gradient_elsewhere_is_read_from_its_owner(parameter, owner):
    parameter.place.note_backward()
    gradient, own = parameter.grad, torch.full((2, 3), 0.5)
    assert gradient is parameter.grad and gradient.is_meta and gradient.shape == (2, 3) and gradient.grad_fn is None
    assert repr(gradient) == repr(own)
    for read in READS:
        assert repr(read(gradient)) == repr(read(own.clone()))
    assert set(owner.asked) == {0} and owner.reads == []


def test_edits_of_a_gradient_elsewhere_are_counted(parameter, owner):
    for number, edit in enumerate(EDITS):
        parameter.place.note_backward()
        edit(parameter.grad)
        edit(parameter.grad)
        if parameter.place.replaced_by is None and parameter.grad is not None:
            assert torch.equal(parameter.grad.clone(), torch.full((2, 3), 0.5))
            versions = torch.ones(2, 3)
            before = versions._version
            edit(versions)
            edit(versions)
            assert owner.asked[-1] == versions._version - before, number
    parameter.place.note_backward()
    parameter.data.add_(parameter.grad, alpha=-0.1)
    assert owner.edits == [("add_", False)] and owner.reads == []


def test_what_only_the_owner_knows_of_a_gradient_is_refused(parameter):
    def replace(p):
        p.grad = torch.ones(2, 3)

    def set_data(p):
        p.grad.data = torch.ones(2, 3)

    for change in (replace, set_data, lambda p: p.grad.data.mul_(2)):
        parameter.place.note_backward()
        change(parameter)
        for read in READS:
            with pytest.raises(
                PfeifeError, match=r"PF525 the gradient of 'weight', which lives on rank 3, is read after"
            ):
                read(parameter.grad)
    for function in (lambda: torch.autograd.grad(parameter.sum(), parameter), lambda: parameter.backward()):
        with pytest.raises(PfeifeError, match="PF526"):
            function()


def test_a_gradient_is_gone_when_it_is_zeroed_and_inside_an_optimizer(parameter, owner):
    optimizer = torch.optim.SGD([parameter, nn.Parameter(torch.ones(1))], lr=0.1)
    module = nn.Linear(3, 2, bias=False)
    module.weight = parameter
    for zero in (
        optimizer.zero_grad, lambda: optimizer.zero_grad(set_to_none=False), module.zero_grad,
        lambda: module.zero_grad(set_to_none=False), lambda: parameter.grad.zero_(),
        lambda: setattr(parameter, "grad", None),
    ):  # fmt: skip
        parameter.grad = torch.ones(2, 3)
        assert type(parameter.grad) is GradientElsewhere
        zero()
        assert parameter.grad is None
    parameter.grad = torch.ones(2, 3)
    owner.hides_gradients = True
    assert parameter.grad is None
    optimizer.step()
    owner.hides_gradients = False
    assert parameter.grad is not None and not optimizer.state


def test_scaled_gradients_are_unscaled_around_it(parameter):
    real = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter, real], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for bad, wanted in ((1.0, 4.0), (float("inf"), 2.0)):
        parameter.grad, real.grad = torch.ones(2, 3), torch.full((2,), 8.0 * bad)
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        assert real.grad[0] == 2.0 * bad
        nn.utils.clip_grad_value_([parameter, real], 1.0)
        parameter.place.source.hides_gradients = True
        scaler.step(optimizer)
        parameter.place.source.hides_gradients = False
        scaler.update()
        assert scaler.get_scale() == wanted
