"""Models named on a command line: built without memory, captured, costed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from pfeife_accelerate.cost.catalogue import device
from pfeife_accelerate.errors import PfeifeError
from pfeife_accelerate.tools.models import ModelCase, ModelledModel, ModelOptions, case, resolve
from pfeife_accelerate.tools.models.names import GROUP

pytestmark = [pytest.mark.local, pytest.mark.timeout(120)]

A100 = device("a100-40gb")
TINY_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 48,
}  # fmt: skip
TINY_SDXL = {
    "_class_name": "UNet2DConditionModel", "_diffusers_version": "0.19.0", "sample_size": 16,
    "block_out_channels": [32], "norm_num_groups": 8, "layers_per_block": 1, "cross_attention_dim": 24,
    "down_block_types": ["CrossAttnDownBlock2D"], "up_block_types": ["UpBlock2D"], "mid_block_type": None,
    "attention_head_dim": 4, "use_linear_projection": True,
    "addition_embed_type": "text_time", "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 80,
}  # fmt: skip


def options(**kwargs):
    overrides = kwargs.pop("overrides", None)
    return ModelOptions(overrides=overrides, **kwargs)


@pytest.fixture
def json_file(tmp_path):
    def write(data, name="config.json"):
        path = tmp_path / name
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return path

    return write


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama") / "config.json"
    path.write_text(json.dumps(TINY_LLAMA))
    return ModelledModel(resolve(str(path.parent), options(dtype=torch.bfloat16, seq=16)))


# -- building ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "millions"), [("vit-g14", 1012.6), ("gpt2-large", 774.0), ("llama2-7b", 6738.4), ("sdxl-unet", 2567.5)]
)
def test_members_of_the_zoo_have_their_published_sizes_and_no_memory(name, millions):
    found = resolve(name, options(dtype=torch.float16))
    parameters = list(found.module.parameters())
    assert sum(p.numel() for p in parameters) / 1e6 == pytest.approx(millions, abs=0.1)
    assert {p.device.type for p in parameters} == {"meta"} and {p.dtype for p in parameters} == {torch.float16}
    assert found.name == name and found.module.training


@pytest.mark.parametrize(
    ("name", "kwargs", "shapes"),
    [
        ("timm:test_resnet", {}, {"x": (2, 3, 160, 160)}),
        ("test_vit", {"resolution": 96}, {"x": (2, 3, 96, 96)}),
        ("test_vit", {"overrides": {"in_chans": 1}}, {"x": (2, 1, 160, 160)}),
        ("transformers:gpt2", {"overrides": {"n_layer": 1, "n_positions": 32}},
         {"input_ids": (2, 32), "labels": (2, 32)}),
        ("transformers:t5", {"seq": 8, "overrides": {"num_layers": 1, "num_decoder_layers": 1}},
         {"input_ids": (2, 8), "labels": (2, 8)}),
        ("BertForSequenceClassification", {"seq": 8, "overrides": {"num_hidden_layers": 1}},
         {"input_ids": (2, 8), "labels": (2,)}),
        ("BertForQuestionAnswering", {"seq": 8, "overrides": {"num_hidden_layers": 1}},
         {"input_ids": (2, 8), "start_positions": (2,), "end_positions": (2,)}),
        ("transformers:BertModel", {"seq": 8, "overrides": {"num_hidden_layers": 1}}, {"input_ids": (2, 8)}),
        ("transformers:vit", {"resolution": 32, "overrides": {"num_hidden_layers": 1}},
         {"pixel_values": (2, 3, 32, 32), "labels": (2,)}),
        ("transformers:whisper", {"seq": 8, "overrides": {"encoder_layers": 1, "decoder_layers": 1}},
         {"input_features": (2, 80, 3000), "labels": (2, 8)}),
        ("diffusers:UNet2DModel", {"resolution": 32}, {"sample": (2, 3, 32, 32), "timestep": (2,)}),
        ("diffusers:DiTTransformer2DModel", {"overrides": {"num_layers": 1}},
         {"hidden_states": (2, 4, 32, 32), "timestep": (2,), "class_labels": (2,)}),
        ("SD3Transformer2DModel", {"seq": 4, "resolution": 32, "overrides": {"num_layers": 1}},
         {"hidden_states": (2, 16, 32, 32), "encoder_hidden_states": (2, 4, 4096), "pooled_projections": (2, 2048),
          "timestep": (2,)}),
        ("AutoencoderKL", {"resolution": 64}, {"sample": (2, 3, 64, 64)}),
    ],
)  # fmt: skip
def test_names_lead_to_a_batch(name, kwargs, shapes):
    batch = resolve(name, options(**kwargs)).batch
    assert {key: tuple(value.shape) for key, value in batch.items()} == shapes


def test_a_member_that_an_installed_package_registers(tmp_path, monkeypatch):
    info = tmp_path / "zoo_member-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: zoo-member\nVersion: 1\n")
    entries = "tiny-member = zoo_member:make\nwrong-member = zoo_member:wrong\n"
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{entries}")
    (tmp_path / "zoo_member.py").write_text(
        "import torch\n"
        "from pfeife_accelerate.tools.models import ModelCase\n"
        "def make(options):\n"
        "    layer = torch.nn.Linear(4, 4, device='meta', dtype=options.dtype)\n"
        "    return ModelCase(name='tiny-member', module=layer, batch={'input': torch.zeros(2, 4)})\n"
        "def wrong(options):\n"
        "    return 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = resolve("tiny-member", options())
    assert isinstance(found, ModelCase) and found.name == "tiny-member"
    with pytest.raises(PfeifeError, match=r"PF136 zoo_member:wrong gave int for the model 'wrong-member'"):
        resolve("wrong-member", options())


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kwargs", "text"),
    [
        ("vit-g15", {}, "PF131 no model is called 'vit-g15'"),
        ("resnet5o", {}, "did you mean 'resnet50'?"),
        ("timm:vit_giant_patch14_clip_225", {}, "did you mean 'vit_giant_patch14_clip_224'?"),
        ("transformers:lama", {}, "PF131 transformers has no model class and no model type 'lama'\n  try    did "),
        ("diffusers:UNet2DConditionModell", {}, "PF131 diffusers has no model class 'UNet2DConditionModell'\n  try    "
         "did you mean 'UNet2DConditionModel'?"),
        ("diffusers:FluxTransformer2DModel", {}, "PF134 no example batch is known for FluxTransformer2DModel"),
        ("nowhere.json", {}, "PF131 nowhere.json is not the configuration of a model\n  why    FileNotFoundError"),
        ("transformers:CLIPModel", {}, "PF134 no example batch is known for CLIPModel\n  why    it takes texts"),
        ("transformers:wav2vec2", {"overrides": {"num_hidden_layers": 1}},
         "PF134 no example batch is known for Wav2Vec2Model\n  why    its main input is 'input_values'"),
        ("gpt2-large", {"overrides": {"n_layers": 2}}, "PF132 the configuration of gpt2-large has no 'n_layers'\n"
         "  where  --set n_layers=...\n  try    did you mean 'n_layer'?"),
        ("UNet2DModel", {"overrides": {"sampl_size": 2}}, "PF132 the configuration of UNet2DModel has no 'sampl_size'"),
        ("test_vit", {"overrides": {"dephth": 2}}, "PF133 test_vit cannot be built\n  why    TypeError"),
        ("test_vit", {"seq": 4}, "PF139 --seq means nothing to test_vit\n  why    its example batch has no tokens"),
        ("transformers:gpt2", {"resolution": 4, "overrides": {"n_layer": 1}},
         "PF139 --resolution means nothing to gpt2\n  why    its example batch has no image whose size is free"),
        ("UNet2DModel", {"seq": 4}, "PF139 --seq means nothing to UNet2DModel"),
        ("UNet2DConditionModel", {"overrides": {"addition_embed_type": "text"}},
         "PF134 no example batch is known for UNet2DConditionModel with addition_embed_type='text'"),
    ],
)  # fmt: skip
def test_names_that_lead_nowhere(name, kwargs, text):
    with pytest.raises(PfeifeError) as failure:
        resolve(name, options(**kwargs))
    assert text in str(failure.value)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("{", "PF131 .* is not the configuration of a model\n  why    JSONDecodeError"),
        ({"layers": 2}, "PF131 .* it has neither a model_type"),
        (
            {"model_type": "lamma"},
            "PF131 transformers .* has no model type 'lamma'\n  where  .*\n.*did you mean 'llama'",
        ),
        ({**TINY_LLAMA, "hidden_size": "wide"}, "PF133 .* cannot be built"),
    ],
)
def test_files_that_are_no_configuration(json_file, data, text):
    with pytest.raises(PfeifeError) as failure:
        resolve(str(json_file(data)), options())
    assert re.search(text, str(failure.value), re.DOTALL), failure.value


def test_a_type_without_a_class_of_its_own():
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    from pfeife_accelerate.tools.models import transformers_models

    tables = [getattr(modeling_auto, name) for name in transformers_models._HEADS]
    alone = next(name for name in CONFIG_MAPPING if not any(name in table for table in tables))
    with pytest.raises(PfeifeError, match=f"PF134 transformers has no model for the type '{alone}' alone"):
        resolve(f"transformers:{alone}", options())


def test_a_library_that_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(
        PfeifeError, match=r"PF135 timm is not installed\n(.|\n)*pip install 'pfeife_accelerate\[zoo\]'"
    ):
        case.library("timm")


def test_timm_models_without_a_known_input(monkeypatch):
    import timm

    monkeypatch.setattr(timm, "get_pretrained_cfg", lambda name: None)
    with pytest.raises(PfeifeError, match="PF134 timm does not say which images test_vit takes"):
        resolve("test_vit", options())


# -- capture and costs -------------------------------------------------------------------------------------------------


def test_a_language_model_at_any_number_of_rows(llama):
    one, four = llama.op_graph(1), llama.op_graph(4)
    assert [node.target for node in one.nodes] == [node.target for node in four.nodes]
    widest = max(node.num_bytes for node in one.nodes)
    assert max(node.num_bytes for node in four.nodes) == 4 * widest
    assert llama.num_parameters == sum(spec.numel for _, spec in one.params if spec.requires_grad)


def test_costs_follow_the_device_and_the_rows(llama):
    one, many = llama.cost_graph(1, A100), llama.cost_graph(4096, A100)
    assert len(one.nodes) == len(llama.op_graph(1).nodes) and one.name == llama.name
    # Few rows cost the launches alone, many cost what they compute and move.
    assert one.work_s < many.work_s < 4096 * one.work_s
    assert many.work_s > 1.3 * llama.cost_graph(4096, device("h100")).work_s
    assert one.legal_cuts and one.fingerprint == llama.op_graph(1).fingerprint


def test_training_keeps_sixteen_bytes_a_parameter(llama):
    uses = {use.owner: use for node in llama.cost_graph(1, A100).nodes for use in node.params}.values()
    trained = [use for use in uses if use.optimizer_s]
    assert sum(use.state_bytes for use in trained) == 16 * llama.num_parameters
    assert sum(use.optimizer_s for use in trained) == pytest.approx(28 * llama.num_parameters / A100.bytes_per_s)
    assert sum(use.num_bytes for use in trained) == 2 * llama.num_parameters


def test_what_is_kept_counts_once(llama):
    graph, ops = llama.cost_graph(8, A100), llama.op_graph(8)
    made = sum(node.num_bytes for node in ops.nodes)
    assert 0 < sum(node.saved_bytes for node in graph.nodes) <= made


def test_batch_norm_leaves_no_micro_batch_of_one_row():
    model = ModelledModel(resolve("test_resnet", options(resolution=32)))
    assert model.least_rows == 2
    assert any(node.op.startswith("conv") for node in model.cost_graph(2, A100).nodes)


def test_a_diffusion_model_whose_conditions_have_the_batch_s_rows(json_file):
    """`time_ids` are reshaped by the rows of another argument, which mixes no rows."""
    model = ModelledModel(resolve(str(json_file(TINY_SDXL)), options(seq=5)))
    small, large = model.op_graph(1), model.op_graph(6)
    assert max(n.num_bytes for n in large.nodes) == 6 * max(n.num_bytes for n in small.nodes)


def test_a_second_model_of_other_numbers():
    """Dynamo takes what differs from an earlier capture of the same code for a symbol; floats as well as sizes."""

    class Scaled(torch.nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.scale = scale
            self.layer = torch.nn.Linear(4, 4, device="meta")

        def forward(self, x):
            return self.layer(x) * self.scale

    for scale in (0.5, 0.25):
        model = ModelledModel(ModelCase(name="scaled", module=Scaled(scale), batch={"x": torch.zeros(2, 4)}))
        assert [node.op for node in model.cost_graph(3, A100).nodes] == ["linear", "mul"]


def test_a_batch_that_cannot_be_divided():
    class Mixing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4, device="meta")

        def forward(self, x):
            return self.layer(x - x.mean(0))

    mixing = ModelCase(name="mixing", module=Mixing(), batch={"x": torch.zeros(2, 4)})
    with pytest.raises(PfeifeError, match=r"PF137 mixing cannot be planned for(.|\n)*an operation .* mixes the rows"):
        ModelledModel(mixing)


def test_a_model_that_cannot_be_captured():
    class Recurrent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.LSTM(4, 4, device="meta")

        def forward(self, x):
            return self.layer(x)[0]

    with pytest.raises(PfeifeError, match="PF510 Recurrent holds recurrent layers"):
        ModelledModel(ModelCase(name="lstm", module=Recurrent(), batch={"x": torch.zeros(2, 3, 4)}))


def test_arguments_with_different_numbers_of_rows():
    class Two(torch.nn.Module):
        def forward(self, x, y):
            return x.sum() + y.sum()

    rows = {"x": torch.zeros(2, 4), "more": {"y": torch.zeros(3, 4)}}
    with pytest.raises(PfeifeError, match="PF510"):
        ModelledModel(ModelCase(name="two", module=Two(), batch=rows))


def test_nothing_is_read_from_a_hub():
    """No module of these asks for a network: names are looked up in what is installed."""
    folder = Path(case.__file__).parent
    assert not [path for path in folder.glob("*.py") if "from_pretrained" in path.read_text()]
