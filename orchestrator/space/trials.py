"""Builds the trial of a point: derived accumulation, limits and measuring, with what forbids the point in words."""

from orchestrator.contract.config import (
    DataSource,
    Knobs,
    Layout,
    Limits,
    MeasureSettings,
    ModelSource,
    TrainSettings,
    TrialConfig,
    content_hash,
)
from orchestrator.contract.facts import Facts
from orchestrator.space.knobs import Point
from orchestrator.spec.catalog import weightless
from orchestrator.spec.sweep import ModelSection, SweepSpec


def model_source(section: ModelSection) -> ModelSource:
    """The model as the trial plane reads it. Unset weights: random for a bare config (also a config.json), else
    pretrained. A well-known id with random weights becomes its built-in config, so that no network is needed."""
    weights = section.weights
    if weights is None:
        is_bare = section.config is not None or (section.path or "").endswith(".json")
        weights = "random" if is_bare else "pretrained"
    source = ModelSource(
        config=section.config,
        path=section.path,
        id=section.id,
        revision=section.revision,
        weights=weights,
        trust_remote_code=section.trust_remote_code,
    )
    return weightless(source) if weights == "random" else source


class TrialBuilder:
    """Makes the `TrialConfig` of each canonical point of one sweep."""

    def __init__(self, spec: SweepSpec, facts: Facts, threads_per_rank: int) -> None:
        self._global_batch = spec.train.global_batch
        self._base = TrialConfig(
            knobs=Knobs.model_validate({"method": "full", "micro_batch": 1}),
            model=model_source(spec.model),
            data=DataSource(
                directory=facts.data.directory,
                digest=facts.data.digest,
                sequence_length=spec.data.sequence_length,
                packing=spec.data.packing,
            ),
            train=TrainSettings.model_validate(spec.train.model_dump(include=set(TrainSettings.model_fields))),
            limits=Limits(
                device_memory_bytes=spec.limits.device_memory,
                host_memory_bytes=spec.limits.host_memory,
                headroom_bytes=spec.limits.headroom,
            ),
            measure=MeasureSettings.model_validate(spec.measure.model_dump(include=set(MeasureSettings.model_fields))),
            world_size=spec.resources.layouts[0].world_size,
            nodes=spec.resources.layouts[0].nodes,
            gradient_accumulation=1,
            device=facts.device,
            threads_per_rank=threads_per_rank,
        )
        self._content = self._base.identity()

    def why_illegal(self, canonical: Point, layout: Layout) -> str:
        """Why the point cannot be run, with the arithmetic; empty when it can."""
        return why_illegal(canonical, self._global_batch, layout)

    def build(self, knobs: Knobs, layout: Layout) -> tuple[str, TrialConfig]:
        """The identity and the configuration of a legal point."""
        accumulation = self._global_batch // (knobs.micro_batch * layout.world_size)
        place = {"world_size": layout.world_size, "nodes": layout.nodes}
        config = self._base.model_copy(update={"knobs": knobs, "gradient_accumulation": accumulation, **place})
        # the same as config.candidate, without dumping the model's config again for each of many thousand points
        content = {
            **self._content,
            "knobs": knobs.model_dump(mode="json"),
            "gradient_accumulation": accumulation,
            **{name: count for name, count in place.items() if count is not None},
        }
        return content_hash(content), config


def why_illegal(canonical: Point, global_batch: int, layout: Layout) -> str:
    """Why a canonical point cannot be run on the ranks of `layout`, with the arithmetic; empty when it can."""
    world_size = layout.world_size
    if layout.nodes is not None and world_size % layout.nodes:
        return f"devices_per_trial {world_size} is not divisible by nodes {layout.nodes}"
    micro_batch = canonical["micro_batch"]
    assert isinstance(micro_batch, int)
    rows = micro_batch * world_size
    if global_batch % rows:
        ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
        return f"global_batch {global_batch} is not divisible by micro_batch {micro_batch} x {ranks} = {rows}"
    gathered = canonical["allgather_bucket_size"]
    if isinstance(gathered, int) and gathered % 2:
        return f"allgather_bucket_size {gathered} is odd, and DeepSpeed gathers pairs of elements"
    return ""
