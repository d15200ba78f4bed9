"""The same bodies with backwards in halves, and with stages that compute their activations again."""

from __future__ import annotations

from dataclasses import replace

from fidelity_kit import CASES, add

_ZB_H1 = {"schedule": "zb-h1"}
_ZB_V = {"schedule": "zb-v", "num_loops": 2}
_LISTED = {"schedule": "auto", "backward": "split"}
_SAME: dict[str, object] = {}

#: The case whose body is run anew, what is put into its options, how its plan is turned, ranks, whether it is slow.
_RUNS = (
    ("loss_divided_by_accumulation_steps", _ZB_H1, "", 2, False),
    ("rows_of_conditions_compared", _ZB_V, "", 2, True),
    ("batch_norm_in_training_mode", _SAME, "recomputed", 2, False),
    ("contrastive", _ZB_H1, "half_recomputed", 2, False),
    ("short_last_batch", _ZB_V, "half_recomputed", 3, True),
    ("autocast_bfloat16", _ZB_H1, "", 2, False),
    ("short_last_batch", _ZB_H1, "", 3, False),
    ("vit-float32-gpipe-4", _ZB_H1, "", 2, True),
    ("vit-float32-gpipe-4", _LISTED, "", 2, True),
    ("resnet-float32-1f1b-4", _ZB_V, "", 2, True),
    ("resnet-float32-1f1b-4", _ZB_V, "recomputed", 2, True),
    ("whisper-float64-1f1b-4", _ZB_H1, "", 2, True),
    ("t5-float64-1f1b-4", _ZB_V, "half_recomputed", 3, True),
    ("autocast_bfloat16", _ZB_V, "half_recomputed", 2, True),
    ("autocast_bfloat16_llama", _ZB_H1, "recomputed", 2, True),
    ("loss_divided_by_accumulation_steps", _SAME, "recomputed", 2, True),
    ("rows_of_conditions_compared", _SAME, "half_recomputed", 3, True),
    ("batch_norm_in_training_mode", _ZB_H1, "half_recomputed", 3, True),
    ("a_counter_in_forward", _SAME, "recomputed", 2, True),
    ("a_running_mean_in_forward", _ZB_V, "recomputed", 2, True),
    ("norm_counts_a_tied_parameter_once", _ZB_V, "", 3, True),
    ("gradients_zeroed_in_every_way", _ZB_H1, "", 3, True),
    ("two_backwards_through_one_call", _ZB_H1, "half_recomputed", 2, True),
    ("logits_read_late_on_one_rank", _ZB_V, "recomputed", 2, True),
    ("one_model_feeds_another", _ZB_H1, "recomputed", 3, True),
    ("evaluation_between_steps", _ZB_V, "half_recomputed", 3, True),
    ("scaler_with_overflows_on_one_stage", _ZB_H1, "", 2, True),
    ("penalty_inside", _ZB_H1, "recomputed", 2, True),
)


def _add_runs() -> None:
    for name, changes, plan, size, slow in _RUNS:
        case = CASES[name]
        order = "split" if "backward" in changes else str(changes.get("schedule", ""))
        label = "_".join(filter(None, (order, plan)))
        options = {**case.options, **changes}
        add(replace(case, name=f"{name}__{label}", ranks=(size,), options=options, plan=plan, slow=slow))


_add_runs()
