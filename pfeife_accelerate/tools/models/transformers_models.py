"""Models of transformers: by class, by model type, or by a configuration, each with a batch and its labels.

Models: language models, translators, classifiers of texts and images, speech recognisers.
Ignores: models whose main input is none of these; they are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from pfeife_accelerate.errors import PfeifeError, did_you_mean
from pfeife_accelerate.tools.models.case import (
    ROWS,
    ModelCase,
    ModelOptions,
    built,
    library,
    unknown_override,
    unused_option,
)

__all__ = ["from_transformers", "from_transformers_config", "is_transformers_name", "transformers_names"]

_SEQ = 1024  # tokens of a row where nobody says otherwise, or as many as the model takes
_IMAGE = 224

#: Which class stands for a model type: the first of these tables of transformers that has it.
_HEADS = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)


def transformers_names() -> list[str]:
    """Classes that are built from a configuration, and model types."""
    transformers = library("transformers")
    classes = [name for name in dir(transformers) if "For" in name or name.endswith(("Model", "LMHeadModel"))]
    return [*classes, *transformers.CONFIG_MAPPING.keys()]


def is_transformers_name(name: str) -> bool:
    """Whether transformers has such a model class or model type."""
    transformers = library("transformers")
    return name in transformers.CONFIG_MAPPING or _class_called(name) is not None


def from_transformers(name: str, options: ModelOptions, *, title: str | None = None) -> ModelCase:
    """The case for a class (`LlamaForCausalLM`) or a model type (`llama`) with its default configuration.

    Raises: PfeifeError PF131 to PF134 and PF139.
    """
    transformers = library("transformers")
    model_class = _class_called(name)
    if model_class is not None:
        config_class = model_class.config_class
    elif name in transformers.CONFIG_MAPPING:
        config_class, model_class = transformers.CONFIG_MAPPING[name], _class_for_type(name)
    else:
        near = did_you_mean(name, transformers_names())
        raise PfeifeError(
            id="PF131",
            what=f"transformers has no model class and no model type {name!r}",
            hints=(f"did you mean {near!r}?",) if near else ("LlamaForCausalLM, or llama",),
        )
    return _case(title or name, model_class, config_class, {}, options)


def from_transformers_config(data: Mapping[str, Any], path: str, options: ModelOptions) -> ModelCase:
    """The case for what a `config.json` of transformers describes.

    Raises: PfeifeError PF131 to PF134 and PF139.
    """
    transformers = library("transformers")
    model_type = str(data.get("model_type"))
    if model_type not in transformers.CONFIG_MAPPING:
        near = did_you_mean(model_type, transformers.CONFIG_MAPPING.keys())
        raise PfeifeError(
            id="PF131",
            what=f"transformers {transformers.__version__} has no model type {model_type!r}",
            where=path,
            hints=(f"did you mean {near!r}?",) if near else (),
        )
    architectures = data.get("architectures") or ()
    model_class = _class_called(architectures[0]) if architectures else None
    config_class = transformers.CONFIG_MAPPING[model_type]
    return _case(path, model_class or _class_for_type(model_type), config_class, data, options)


def _class_called(name: str) -> Any:
    transformers = library("transformers")
    if name not in dir(transformers):
        return None
    found = getattr(transformers, name)
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model and found.config_class is not None else None


def _class_for_type(model_type: str) -> Any:
    tables = library("transformers.models.auto.modeling_auto")
    for table in _HEADS:
        name = getattr(tables, table).get(model_type)
        if name is not None:
            return _class_called(name if isinstance(name, str) else name[0])
    raise PfeifeError(
        id="PF134",
        what=f"transformers has no model for the type {model_type!r} alone",
        hints=("name the class: transformers:LlamaForCausalLM",),
    )


def _case(title: str, model_class: Any, config_class: Any, data: Mapping[str, Any], options: ModelOptions) -> ModelCase:
    changed = dict(options.overrides or {})
    known = {**config_class().to_dict(), **config_class.attribute_map}
    for key in changed:
        if key not in known:
            raise unknown_override(title, key, known)
    if options.resolution is not None and "image_size" in known:
        changed["image_size"] = options.resolution
    if "use_cache" in known:
        changed.setdefault("use_cache", False)  # for generating; as outputs of a training step they are kept in vain
    values = {**data, **changed}
    made: list[Any] = []

    def build() -> Any:
        config = config_class.from_dict(values) if data else config_class(**values)
        if config.is_encoder_decoder:  # the decoder's inputs are made of the labels by these two, whatever they are
            for key in ("decoder_start_token_id", "pad_token_id"):
                if config.to_dict().get(key) is None:
                    setattr(config, key, 0)
        made.append(config)
        return model_class(config)

    module = built(title, options, build)
    return ModelCase(name=title, module=module, batch=_batch(title, model_class, made[0], options))


def _batch(title: str, model_class: Any, config: Any, options: ModelOptions) -> dict[str, Any]:
    settings = {**config.to_dict(), **{name: config.to_dict().get(own) for name, own in config.attribute_map.items()}}
    seq = options.seq or min(_SEQ, settings.get("max_position_embeddings") or _SEQ)
    ids = torch.zeros(ROWS, seq, dtype=torch.long)
    name = model_class.__name__
    match model_class.main_input_name:
        case _ if {"input_ids", "pixel_values"} <= set(inspect.signature(model_class.forward).parameters):
            raise _no_batch(name, "it takes texts and images together")
        case "input_ids":
            unused_option(title, options, uses=("seq",))
            return {"input_ids": ids, **_text_labels(name, ids)}
        case "pixel_values":
            unused_option(title, options, uses=("resolution",) if "image_size" in settings else ())
            size = settings.get("image_size") or _IMAGE
            height, width = size if isinstance(size, list | tuple) else (size, size)
            channels = settings.get("num_channels") or 3
            images = torch.zeros(ROWS, channels, height, width, dtype=options.dtype)
            labels = {"labels": torch.zeros(ROWS, dtype=torch.long)} if "Classification" in name else {}
            return {"pixel_values": images, **labels}
        case "input_features" if "num_mel_bins" in settings and "max_source_positions" in settings:
            unused_option(title, options, uses=("seq",))
            target = options.seq or min(_SEQ, settings.get("max_target_positions") or _SEQ)
            frames = (ROWS, settings["num_mel_bins"], 2 * settings["max_source_positions"])
            features = torch.zeros(frames, dtype=options.dtype)
            return {"input_features": features, "labels": torch.zeros(ROWS, target, dtype=torch.long)}
        case other:
            raise _no_batch(name, f"its main input is {other!r}; known are token ids, images, and features of speech")


def _no_batch(name: str, why: str) -> PfeifeError:
    return PfeifeError(
        id="PF134",
        what=f"no example batch is known for {name}",
        why=why,
        hints=("a member of the entry-point group pfeife_accelerate.models says itself how it is called",),
    )


def _text_labels(name: str, ids: torch.Tensor) -> dict[str, Any]:
    row = torch.zeros(ROWS, dtype=torch.long)
    if "SequenceClassification" in name:
        return {"labels": row}
    if "QuestionAnswering" in name:
        return {"start_positions": row, "end_positions": row.clone()}
    has_labels = name.endswith(("LM", "LMHeadModel", "TokenClassification", "ConditionalGeneration"))
    return {"labels": ids.clone()} if has_labels else {}
