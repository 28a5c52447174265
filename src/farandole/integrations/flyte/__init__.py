"""Flyte tasks whose function runs on ranks: `@task(task_config=Farandole(num_workers=4))`.

The import registers with flytekit the task type, the decoder of tables for ranks, and the type transformer of
estimators and fitted models."""

from farandole.extras import importing

with importing(__name__):
    from flytekitplugins.kfmpi import CleanPodPolicy, RestartPolicy, RunPolicy

    from farandole.integrations.flyte.horovod_job import ElasticHorovodJob
    from farandole.integrations.flyte.models import ModelTransformer
    from farandole.integrations.flyte.rows import SourceDecoder
    from farandole.integrations.flyte.task import Farandole, FarandoleTask

__all__ = [
    "CleanPodPolicy",
    "ElasticHorovodJob",
    "Farandole",
    "FarandoleTask",
    "ModelTransformer",
    "RestartPolicy",
    "RunPolicy",
    "SourceDecoder",
]
