"""The same bodies under plans of any shape: stages on any ranks, any order, several models whose losses are apart."""

from __future__ import annotations

from dataclasses import replace

from fidelity_kit import CASES, add

#: For each number of ranks: cases whose bodies are run anew, with the kind of plan and the stages per rank.
_SHAPES: dict[int, dict[str, tuple[str, int]]] = {
    2: {
        "loss_outside": ("v", 2),
        "weighted_by_signal_to_noise": ("v", 2),
        "contrastive": ("v", 2),
        "logits_read_late_on_one_rank": ("scattered", 3),
        "adversaries": ("v", 2),
        "batch_norm_in_training_mode": ("scattered", 2),
        "norms_and_clipping": ("v", 2),
        "two_backwards_through_one_call": ("idle", 2),
        "a_trainable_head_outside": ("v", 3),
    },
    3: {
        "norm_counts_a_tied_parameter_once": ("scattered", 2),
        "short_last_batch": ("wave", 3),
        "changing_lengths": ("scattered", 2),
        "evaluation_between_steps": ("scattered", 3),
        "two_calls_in_one_loss": ("wave", 2),
        "four_networks": ("scattered", 2),
        "one_model_feeds_another": ("v", 2),
        "gradient_accumulation": ("wave", 3),
        "scaler_with_a_stage_without_gradients": ("idle", 2),
        "heads_in_turn": ("scattered", 2),
        "previous_step_read": ("wave", 2),
        "moving_average_of_parameters": ("scattered", 2),
    },
}
#: Of these the command alone runs: others show the same sooner.
_SLOW = frozenset({
    "a_trainable_head_outside", "adversaries", "four_networks", "gradient_accumulation", "one_model_feeds_another",
    "previous_step_read", "scaler_with_a_stage_without_gradients", "weighted_by_signal_to_noise",
})  # fmt: skip


def _add_shapes() -> None:
    for size, shapes in _SHAPES.items():
        for name, (plan, num_loops) in shapes.items():
            case = CASES[name]
            options = {**case.options, "schedule": "gpipe", "num_loops": num_loops}
            slow = case.slow or name in _SLOW
            add(replace(case, name=f"{name}__{plan}", ranks=(size,), options=options, plan=plan, slow=slow))


_add_shapes()
