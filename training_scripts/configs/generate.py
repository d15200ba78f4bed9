"""Write the Accelerate configurations of this folder: every engine, number of devices and precision.

    python training_scripts/configs/generate.py

A file's name is `<engine>_<device><processes>`, and for GPUs `_<precision>`: `pfeife_gpu8_fp16.yaml`. Each is an
ordinary configuration for `accelerate launch --config_file`; those of pfeife need the package installed, and no change
of a script.
"""

from pathlib import Path

import yaml

FOLDER = Path(__file__).resolve().parent
SIZES = (2, 4, 8)
PRECISIONS = {"fp16": "fp16", "fp32": "no"}

PIPELINE = {"pfeife_config": {"schedule": "auto", "num_microbatches": "auto"}}
SHARDED = {
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True,
        "fsdp_offload_params": False,
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
}


def zero(stage):
    # DeepSpeed clips by its own configuration: the value is the default of --max_grad_norm.
    options = {
        "zero_stage": stage,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0,
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
    }
    if stage == 3:
        options |= {"zero3_init_flag": False, "zero3_save_16bit_model": True}
    return {"deepspeed_config": options}


GPU_ENGINES = {
    "ddp": ("MULTI_GPU", {}),
    "fsdp2": ("FSDP", SHARDED),
    "zero2": ("DEEPSPEED", zero(2)),
    "zero3": ("DEEPSPEED", zero(3)),
    "pfeife": ("MULTI_GPU", PIPELINE),
}


def configuration(distributed_type, num_processes, *, mixed_precision="no", use_cpu=False, **sections):
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": distributed_type,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": mixed_precision,
        "num_machines": 1,
        "num_processes": num_processes,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": use_cpu,
        **sections,
    }


def configurations():
    """{name: configuration} of all files."""
    found = {
        "plain_cpu": configuration("NO", 1, use_cpu=True),
        # Accelerate starts several local processes for GPUs only: ACCELERATE_USE_CPU=true lets them compute on the CPU.
        "ddp_cpu2": configuration("MULTI_GPU", 2),
        "pfeife_cpu2": configuration("MULTI_CPU", 2, use_cpu=True, **PIPELINE),
        "pfeife_cpu3": configuration("MULTI_CPU", 3, use_cpu=True, **PIPELINE),
    }
    for engine, (distributed_type, sections) in GPU_ENGINES.items():
        for size in SIZES:
            for precision, mixed_precision in PRECISIONS.items():
                name = f"{engine}_gpu{size}_{precision}"
                found[name] = configuration(distributed_type, size, mixed_precision=mixed_precision, **sections)
    return found


def text(name, options):
    """What the file of this name contains."""
    environment = "ACCELERATE_USE_CPU=true " if name.startswith("ddp_cpu") else ""
    command = f"accelerate launch --config_file training_scripts/configs/{name}.yaml"
    header = f"# Written by generate.py. {environment}{command} SCRIPT\n"
    return header + yaml.safe_dump(options, sort_keys=True)


def main():
    for name, options in configurations().items():
        (FOLDER / f"{name}.yaml").write_text(text(name, options))


if __name__ == "__main__":
    main()
