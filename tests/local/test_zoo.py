"""The zoo: its members at full size without memory, the tiny ones for real, and the commands that show them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pfeife_accelerate.config import PfeifePlugin, child_environment
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.tools.cli import main
from pfeife_accelerate.tools.models import ModelOptions, resolve
from pfeife_accelerate.tools.zoo import fill_in
from pfeife_accelerate.tools.zoo_arguments import add_zoo_arguments
from pfeife_accelerate.zoo import FIGURES, GAINS, MEMBERS, PUBLISHED_SETTINGS, member
from pfeife_accelerate.zoo.paper import System
from tests.launching import run_command

pytestmark = [pytest.mark.local, pytest.mark.timeout(120)]

#: As published: Llama 2's and SDXL's model cards, transformers' count of GPT2-large, timm's of ViT-g/14 (CLIP) with a
#: classifier for ImageNet-1k instead of CLIP's projection (1,012,646,656 - 24 x 1,409).
PARAMETERS = {
    "vit-g14": 1_012_612_840,
    "gpt2-large": 774_030_080,
    "llama2-7b": 6_738_415_616,
    "sdxl-unet": 2_567_463_684,
    "vit-g14-tiny": 3_204_250,
    "gpt2-large-tiny": 1_701_120,
    "llama2-7b-tiny": 1_681_536,
    "sdxl-unet-tiny": 5_423_844,
}
TINY = [name for name in PARAMETERS if name.endswith("-tiny")]


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "180")


def shapes(values):
    return {
        key: (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else shapes(value)
        for key, value in values.items()
    }


def step(model, batch, loss):
    value = loss(model(**batch.inputs), batch.targets)
    value.backward()
    return value.item()


# -- members -----------------------------------------------------------------------------------------------------------


def test_the_members_are_the_paper_s_four_models_and_a_tiny_one_of_each():
    assert list(MEMBERS) == list(PARAMETERS)
    assert [model.name for model in MEMBERS.values() if model.is_tiny] == TINY
    for name, model in MEMBERS.items():
        assert model.name == name and model.licence and model.title and model.is_installed
        assert (model.weights is None) == model.is_tiny
        assert model.tokenizer or model.transform


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_as_many_as_published(name):
    module = member(name).build("meta", dtype=torch.float16)
    parameters = list(module.parameters())
    assert {p.device.type for p in parameters} == {"meta"} and {p.dtype for p in parameters} == {torch.float16}
    assert sum(p.numel() for p in parameters) == PARAMETERS[name] == member(name).num_parameters
    assert module.training


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_member_is_planned_for_with_the_batch_that_it_trains_on(name):
    found = resolve(name, ModelOptions(dtype=torch.bfloat16))
    assert found.name == name
    assert shapes(found.batch) == shapes(member(name).batch(2, dtype=torch.bfloat16).inputs)


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_member_trains(name):
    model = member(name)
    module, batch = model.build("random"), model.batch(4)
    first = step(module, batch, model.loss)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for _ in range(4):
        optimizer.step()
        optimizer.zero_grad()
        last = step(module, batch, model.loss)
    assert last < first


@pytest.mark.parametrize("name", TINY)
def test_weights_and_batches_depend_on_the_seed_alone(name):
    model = member(name)
    before = torch.get_rng_state()
    with torch.no_grad():
        one = [next(model.build(seed=seed).parameters()).clone() for seed in (0, 0, 1)]
        batches = [next(iter(model.batch(2, seed=seed).inputs.values())) for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    for first, same, other in (one, batches):
        assert torch.equal(first, same) and not torch.equal(first, other)


def test_a_batch_of_other_sizes():
    sizes = {"seq": 5, "resolution": 8}
    batch = member("sdxl-unet-tiny").batch(3, dtype=torch.float16, **sizes).inputs
    assert batch["encoder_hidden_states"].shape == (3, 5, 64) and batch["sample"].shape == (3, 4, 8, 8)
    assert batch["added_cond_kwargs"]["time_ids"].tolist() == [[64, 64, 0, 0, 64, 64]] * 3
    assert batch["sample"].dtype is torch.float16
    changed = {"overrides": {"vocab_size": 11}}
    assert member("llama2-7b-tiny").batch(4, **changed).inputs["input_ids"].max() < 11
    assert member("llama2-7b-tiny").build("meta", **changed).lm_head.weight.shape[0] == 11
    assert len(member("vit-g14-tiny").build("meta", overrides={"depth": 2}).blocks) == 2


def test_a_batch_moves_to_a_device_with_what_it_holds():
    moved = member("sdxl-unet-tiny").batch(2).to("meta")
    assert moved.inputs["added_cond_kwargs"]["text_embeds"].is_meta and moved.targets["noise"].is_meta


def test_what_other_names_lead_to():
    with pytest.raises(PfeifeError, match=r"PF156 the zoo has no model 'llama-7b'\n.*did you mean 'llama2-7b'"):
        member("llama-7b")
    with pytest.raises(PfeifeError, match="try    its members: vit-g14, gpt2-large"):
        member("zzz")


# -- configurations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in PARAMETERS if "llama" in name or "gpt2" in name])
def test_transformers_reads_the_configuration_by_itself(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(member(name).folder)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in module.parameters()) == PARAMETERS[name]
    assert next(module.parameters()).dtype is torch.float32


@pytest.mark.parametrize("name", ["sdxl-unet", "sdxl-unet-tiny"])
def test_diffusers_reads_the_configuration_by_itself(name):
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        module = UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(member(name).folder))
    assert sum(p.numel() for p in module.parameters()) == PARAMETERS[name]


def test_a_tiny_member_has_the_same_architecture():
    for name in TINY:
        full, tiny = member(name.removesuffix("-tiny")).config, member(name).config
        for key in ("architecture", "architectures", "model_type", "_class_name", "addition_embed_type",
                    "down_block_types", "up_block_types"):  # fmt: skip
            assert full.get(key) == tiny.get(key)
        assert full.keys() - tiny.keys() == set()


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama2-7b-tiny", "gpt2-large-tiny", "sdxl-unet-tiny"])
def test_weights_from_a_folder(name, tmp_path):
    model = member(name)
    module = model.build(seed=3)
    folder = tmp_path / "unet" if name.startswith("sdxl") else tmp_path
    module.save_pretrained(folder)
    for place in {folder, tmp_path}:  # a U-Net alone, or within a pipeline
        loaded = model.build(str(place), dtype=torch.float64)
        assert loaded.training
        for key, value in loaded.state_dict().items():
            assert torch.equal(value, module.state_dict()[key].double()), key


def test_timm_weights_from_a_folder(tmp_path):
    from safetensors.torch import save_file

    model = member("vit-g14-tiny")
    module = model.build(seed=3)
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    loaded = model.build(str(tmp_path))
    assert all(torch.equal(value, module.state_dict()[key]) for key, value in loaded.state_dict().items())


def test_weights_that_are_not_there(tmp_path):
    with pytest.raises(PfeifeError, match="PF155 vit-g14-tiny has no published weights"):
        member("vit-g14-tiny").build("pretrained")
    with pytest.raises(
        PfeifeError, match=r"PF155 the weights of llama2-7b cannot be loaded from '.*'\n  why    \w+Error: U"
    ):
        member("llama2-7b").build(str(tmp_path))


# -- texts and images --------------------------------------------------------------------------------------------------


def test_images_become_rows_of_the_batch():
    from PIL import Image

    for name, mode, side in (
        ("vit-g14", "RGB", 224),
        ("vit-g14-tiny", "L", 28),
        ("sdxl-unet", "RGBA", 1024),
        ("sdxl-unet-tiny", "L", 128),
    ):
        row = member(name).transform()(Image.new(mode, (40, 30)))
        assert row.shape == (3, side, side) and row.dtype is torch.float32


def test_texts_become_tokens_of_the_vocabulary():
    for name in ("llama2-7b-tiny", "gpt2-large-tiny"):
        tokenizer = member(name).tokenizer(None)
        assert len(tokenizer) == member(name).config["vocab_size"]
        assert tokenizer.decode(tokenizer("pipeline").input_ids, skip_special_tokens=True) == "pipeline"


# -- the paper ---------------------------------------------------------------------------------------------------------


def test_the_paper_s_figures_are_of_members_and_say_where_they_stand():
    for entry in (*FIGURES, *GAINS, *PUBLISHED_SETTINGS):
        assert entry.model in MEMBERS and entry.place
    best = {(f.model, f.num_devices, f.precision): f.items_per_s for f in FIGURES if f.system is System.PFEIFE}
    assert best == {
        ("vit-g14", 4, None): 151.4, ("vit-g14", 8, None): 282.2, ("llama2-7b", 8, None): 7.46,
        ("sdxl-unet", 8, "fp32"): 6.09, ("sdxl-unet", 8, "fp16"): 12.1, ("sdxl-unet", 2, "fp16"): 3.72,
    }  # fmt: skip
    assert [gain.part for gain in member("vit-g14").gains] == ["prefetch", "looping"]
    for figure in FIGURES:  # each has something to be compared with
        assert sum(other.circumstances == figure.circumstances for other in FIGURES) >= 2


# -- commands ----------------------------------------------------------------------------------------------------------


def words(*arguments):
    parser = argparse.ArgumentParser()
    add_zoo_arguments(parser)
    return parser.parse_args([str(word) for word in arguments])


def test_list_names_all_members(capsys, monkeypatch):
    monkeypatch.setattr("pfeife_accelerate.zoo.model.is_installed", lambda name: name != "diffusers")
    assert main(["zoo", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, model in MEMBERS.items():
        (line,) = [line for line in lines if f" {name} " in line]
        assert f"{model.num_parameters / 1e6:,.1f} M" in line
        assert ("not installed" in line) == (model.library == "diffusers")


def test_show_tells_all_about_a_member(capsys):
    assert main(["zoo", "show", "sdxl-unet"]) == 0
    printed = capsys.readouterr().out
    for text in ("2,567,463,684", "CreativeML Open RAIL++-M", "8 rows, 77 tokens, 128x128", "out of memory", "6.09",
                 "stabilityai/stable-diffusion-xl-base-1.0", "against DeepSpeed ZeRO", "128 pixels"):  # fmt: skip
        assert text in printed
    assert main(["zoo", "show", "vit-g14"]) == 0
    printed = capsys.readouterr().out
    assert "looping gains 9% of the latency" in printed and "32 layers" in printed and "282.2" in printed
    assert main(["zoo", "show", "llama2-7b-tiny"]) == 0
    printed = capsys.readouterr().out
    assert "In the paper" not in printed and "none: it is trained from random ones" in printed


def test_plan_fills_in_what_was_not_said():
    filled = fill_in(words("plan", "vit-g14"))
    assert (filled.machine, filled.ranks, filled.batch, filled.dtype) == ("a100-40gb", 8, 96, None)
    filled = fill_in(words("plan", "--ranks", 4, "vit-g14-tiny", "--batch", 8, "--dtype", "bf16"))
    assert (filled.machine, filled.ranks, filled.batch, filled.dtype) == ("cpu", 4, 8, "bf16")


def test_plan_plans_as_pfeife_plan_does(capsys, tmp_path):
    given = ["--microbatches", "2", "--effort", "quick", "--set", "num_hidden_layers=2"]
    assert main(["zoo", "plan", "llama2-7b-tiny", *given]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("llama2-7b-tiny, 0.5 M parameters in fp32: 2 ranks of")
    own = ["--machine", "cpu", "--ranks", "2", "--batch", "16"]
    assert main(["plan", "llama2-7b-tiny", *given, *own]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("show", "vit-g15"), "PF156 the zoo has no model 'vit-g15'"),
        (("plan",), "PF140 pfeife plan takes either MODEL or --graph FILE"),
        (("plan", "lama2-7b"), "did you mean 'llama2-7b'?"),
        (("bench", "vit-g14-tiny", "--ranks", "0"), "PF157 --ranks 0"),
        (("bench", "vit-g14-tiny", "--seq", "50"), "PF157 --seq 50\n  why    vit-g14-tiny has no such size"),
        (("bench", "llama2-7b-tiny", "--resolution", "8"), "PF157 --resolution 8"),
        (
            ("bench", "vit-g14-tiny", "--ranks", "4096", "--device", "cuda"),
            "PF158 4096 ranks on GPUs need as many",
        ),
    ],
)
def test_words_that_mean_nothing(given, text, capsys):
    assert main(["zoo", *given]) == 2
    assert text in capsys.readouterr().err


def test_a_member_whose_library_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "timm", None)
    assert main(["zoo", "bench", "vit-g14-tiny"]) == 2
    assert capsys.readouterr().err.startswith("PF135 timm is not installed")
    with pytest.raises(PfeifeError, match="PF135"):
        member("vit-g14-tiny").build("meta")


def test_the_zoo_is_not_imported_before_it_is_asked_for():
    code = (
        "import sys; from pfeife_accelerate.tools import cli\n"
        "assert not {'pfeife_accelerate.zoo', 'rich', 'timm', 'transformers', 'diffusers'} & set(sys.modules)"
    )
    run_command([sys.executable, "-c", code], timeout=60).check()


def test_members_need_no_library_before_they_are_built():
    code = (
        "import sys\n"
        "for name in ('timm', 'transformers', 'diffusers', 'torchvision'): sys.modules[name] = None\n"
        "from pfeife_accelerate.zoo import MEMBERS\n"
        "assert all(model.batch(1).inputs and model.config for model in MEMBERS.values())"
    )
    run_command([sys.executable, "-c", code], timeout=60).check()


def test_a_child_process_takes_no_part_in_the_launch_of_its_parent(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_USE_CPU", "PFEIFE_SCHEDULE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("ELSEWHERE", "kept")
    plain = child_environment(None, {"OMP_NUM_THREADS": "2"})
    assert plain["ELSEWHERE"] == "kept" and plain["OMP_NUM_THREADS"] == "2"
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_USE_CPU", "PFEIFE_SCHEDULE", "LOCAL_WORLD_SIZE"} & set(
        plain
    )
    piped = child_environment(PfeifePlugin(num_microbatches=2), {"RANK": "0"})
    assert piped["PFEIFE_NUM_MICROBATCHES"] == "2" and piped["PFEIFE_ENABLED"] == "true" and piped["RANK"] == "0"


# -- what is installed -------------------------------------------------------------------------------------------------


def test_the_folder_of_a_member_is_in_the_package():
    for model in MEMBERS.values():
        assert isinstance(model.folder, Path) and (model.folder / "config.json").is_file()
