"""Resources of the workers' pods in what a task hands to Flyte's MPI plug-in."""

from typing import Any


def following_task(custom: dict[str, Any]) -> dict[str, Any]:
    """Return a task's `custom` part so that workers without resources of their own have those of the task's node.

    Flyte's cluster takes the empty resources that flytekit writes as none. Without the field it takes those of `@task`
    or, for a node of a workflow, of `with_overrides`."""
    worker = dict(custom["workerReplicas"])
    if not worker.get("resources"):
        worker.pop("resources", None)
    return {**custom, "workerReplicas": worker}
