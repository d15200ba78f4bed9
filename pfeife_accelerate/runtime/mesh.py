"""Which rank of which pipeline this process is, and the process groups that follow from it.

Models: world rank = pipeline index * pipeline size + rank in the pipeline, so a pipeline's ranks are neighbours and
stay on one host where they fit.
Ignores: which stages a rank holds; that is the plan's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from pfeife_accelerate.compat import set_default_process_group, set_group_ranks
from pfeife_accelerate.errors import PfeifeError

__all__ = ["MeshShape", "PipelineMesh", "build_mesh", "use_pipelines_as_world"]


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """The numbers of a mesh, checked before any process group is made."""

    world_rank: int
    world_size: int
    pipeline_size: int

    def __post_init__(self) -> None:
        """Refuse a pipeline size that does not divide the number of processes."""
        if not self.pipeline_size >= 1 or self.world_size % self.pipeline_size != 0:
            raise _indivisible(self.world_size, self.pipeline_size)

    @classmethod
    def of(cls, *, world_rank: int, world_size: int, pipeline_size: int | None) -> MeshShape:
        """The shape for this process; a pipeline size of None means one pipeline of all processes."""
        return cls(
            world_rank=world_rank,
            world_size=world_size,
            pipeline_size=world_size if pipeline_size is None else pipeline_size,
        )

    @property
    def num_pipelines(self) -> int:
        """Replicas of the model."""
        return self.world_size // self.pipeline_size

    @property
    def pipeline_index(self) -> int:
        """Which pipeline this process belongs to."""
        return self.world_rank // self.pipeline_size

    @property
    def rank(self) -> int:
        """Position of this process in its pipeline."""
        return self.world_rank % self.pipeline_size

    @property
    def is_main(self) -> bool:
        """Whether this is the one process of the launch that speaks for the script."""
        return self.world_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the one process that speaks for the last pipeline; with one pipeline, the main one."""
        return self.rank == 0 and self.pipeline_index == self.num_pipelines - 1

    def pipeline_ranks(self, pipeline_index: int) -> tuple[int, ...]:
        """World ranks of a pipeline, in order."""
        start = pipeline_index * self.pipeline_size
        return tuple(range(start, start + self.pipeline_size))

    def replica_ranks(self, rank: int) -> tuple[int, ...]:
        """World ranks that hold position `rank`, one of each pipeline."""
        return tuple(range(rank, self.world_size, self.pipeline_size))


@dataclass(frozen=True, kw_only=True)
class PipelineMesh:
    """The shape and its process groups; in every group, ranks are counted in world order.

    `pipeline_group` carries tensors between the ranks of a pipeline, `pipeline_reverse_group` those to lower ranks
    where the backend would make the two directions wait for each other (nccl), `pipeline_control_group` Python objects;
    `replica_group` joins the same position of all pipelines; `world_control_group` (gloo) joins all ranks.
    With these groups, name peers by `group_src=`, `group_dst=`: global numbers mean pipelines to the script.
    """

    shape: MeshShape
    pipeline_group: dist.ProcessGroup
    pipeline_reverse_group: dist.ProcessGroup
    pipeline_control_group: dist.ProcessGroup
    replica_group: dist.ProcessGroup
    world_control_group: dist.ProcessGroup

    @property
    def world_rank(self) -> int:
        """Number of this process among all of the launch."""
        return self.shape.world_rank

    @property
    def world_size(self) -> int:
        """Processes of the launch."""
        return self.shape.world_size

    @property
    def pipeline_size(self) -> int:
        """Processes of one pipeline."""
        return self.shape.pipeline_size

    @property
    def num_pipelines(self) -> int:
        """Replicas of the model."""
        return self.shape.num_pipelines

    @property
    def pipeline_index(self) -> int:
        """Which pipeline this process belongs to."""
        return self.shape.pipeline_index

    @property
    def rank(self) -> int:
        """Position of this process in its pipeline."""
        return self.shape.rank


def build_mesh(pipeline_size: int | None) -> PipelineMesh:
    """Make the mesh of this process; every rank of the launch must call it, with the same size."""
    if not dist.is_initialized():
        raise PfeifeError(
            id="PF121",
            what="torch.distributed is not initialised, so there are no processes to build a pipeline from",
            hints=("start the script by: accelerate launch --config pfeife.yaml train.py", "or by: torchrun train.py"),
        )
    shape = MeshShape.of(world_rank=dist.get_rank(), world_size=dist.get_world_size(), pipeline_size=pipeline_size)
    # Making a group is collective over the world: every rank makes all of them, in this order.
    pipelines = [shape.pipeline_ranks(index) for index in range(shape.num_pipelines)]
    data_groups = [dist.new_group(list(ranks)) for ranks in pipelines]
    has_gpus = "nccl" in str(dist.get_backend_config(data_groups[shape.pipeline_index]))
    reverse_groups = [dist.new_group(list(ranks)) for ranks in pipelines] if has_gpus else data_groups
    control_groups = [dist.new_group(list(ranks), backend="gloo") for ranks in pipelines]
    replica_groups = [dist.new_group(list(shape.replica_ranks(rank))) for rank in range(shape.pipeline_size)]
    world_control_group = dist.new_group(backend="gloo")
    return PipelineMesh(
        shape=shape,
        pipeline_group=data_groups[shape.pipeline_index],
        pipeline_reverse_group=reverse_groups[shape.pipeline_index],
        pipeline_control_group=control_groups[shape.pipeline_index],
        replica_group=replica_groups[shape.rank],
        world_control_group=world_control_group,
    )


def use_pipelines_as_world(mesh: PipelineMesh) -> None:
    """Make the replica group torch's default group: from here on, a global rank is a pipeline's index.

    In our own groups this process keeps its place under its new number; the others get numbers that no pipeline has.
    """
    shape = mesh.shape
    set_group_ranks(mesh.replica_group, {index: index for index in range(shape.num_pipelines)})
    pipeline = shape.pipeline_ranks(shape.pipeline_index)
    for group, world_ranks in (
        (mesh.pipeline_group, pipeline),
        (mesh.pipeline_reverse_group, pipeline),
        (mesh.pipeline_control_group, pipeline),
        (mesh.world_control_group, tuple(range(shape.world_size))),
    ):
        numbers = [
            shape.pipeline_index if world_rank == shape.world_rank else shape.num_pipelines + world_rank
            for world_rank in world_ranks
        ]
        set_group_ranks(group, {number: position for position, number in enumerate(numbers)})
    set_default_process_group(mesh.replica_group)


def _indivisible(world_size: int, pipeline_size: int) -> PfeifeError:
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    larger = -(-world_size // max(pipeline_size, 1)) * max(pipeline_size, 1)
    return PfeifeError(
        id="PF120",
        what=f"{world_size} processes cannot be divided into pipelines of {pipeline_size}",
        where="pipeline_size",
        why="every pipeline holds one whole copy of the model, so no process may be left over",
        hints=(
            f"pipeline_size: {' or '.join(map(str, divisors))}",
            f"start {larger} processes (num_processes: {larger})",
        ),
    )
