"""Schemas for `jsonschema` of the fields of Kubernetes objects that our manifests use; other fields are errors."""

from collections.abc import Mapping

TEXT: dict[str, object] = {"type": "string"}
NAME: dict[str, object] = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
COUNT: dict[str, object] = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
TRUTH: dict[str, object] = {"type": "boolean"}
TEXTS: dict[str, object] = {"type": "array", "items": TEXT}
LABELS: dict[str, object] = {"type": "object", "additionalProperties": TEXT}
PORT: dict[str, object] = {"type": "integer", "minimum": 1, "maximum": 65535}


def closed(fields: Mapping[str, object], *required: str) -> dict[str, object]:
    return {
        "type": "object",
        "properties": dict(fields),
        "required": list(required),
        "additionalProperties": False,
    }


def listed(item: Mapping[str, object], least: int = 0) -> dict[str, object]:
    return {"type": "array", "items": dict(item), "minItems": least}


def one_of(*values: object) -> dict[str, object]:
    return {"enum": list(values)}


METADATA = closed({"name": NAME, "namespace": NAME, "labels": LABELS, "annotations": LABELS})
QUANTITIES = {
    "type": "object",
    "additionalProperties": {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$"},
}
RESOURCES = closed({"requests": QUANTITIES, "limits": QUANTITIES})
PROBE = closed(
    {"tcpSocket": closed({"port": PORT}, "port"), "initialDelaySeconds": COUNT, "periodSeconds": COUNT},
    "tcpSocket",
)
SECRET_KEY = closed({"name": NAME, "key": TEXT}, "name", "key")
VARIABLE = {
    "oneOf": [
        closed({"name": TEXT, "value": TEXT}, "name", "value"),
        closed({"name": TEXT, "valueFrom": closed({"secretKeyRef": SECRET_KEY}, "secretKeyRef")}, "name", "valueFrom"),
    ]
}
CONTAINER = closed(
    {
        "name": NAME,
        "image": TEXT,
        "command": TEXTS,
        "args": TEXTS,
        "env": listed(VARIABLE),
        "ports": listed(closed({"containerPort": PORT, "name": NAME}, "containerPort")),
        "readinessProbe": PROBE,
        "resources": RESOURCES,
        "securityContext": closed({"runAsUser": COUNT, "runAsGroup": COUNT}),
    },
    "name",
    "image",
)
POD = closed(
    {
        "containers": listed(CONTAINER, 1),
        "restartPolicy": one_of("Always", "OnFailure", "Never"),
        "subdomain": NAME,
        "securityContext": closed({"fsGroup": COUNT}),
    },
    "containers",
)
TEMPLATE = closed({"metadata": METADATA, "spec": POD}, "spec")

# kubeflow.org/v2beta1
SCHEDULING = closed(
    {
        "minAvailable": COUNT,
        "queue": TEXT,
        "minResources": QUANTITIES,
        "priorityClass": TEXT,
        "scheduleTimeoutSeconds": COUNT,
    }
)
RUN_POLICY = closed(
    {
        "cleanPodPolicy": one_of("None", "Running", "All"),
        "ttlSecondsAfterFinished": COUNT,
        "activeDeadlineSeconds": COUNT,
        "backoffLimit": COUNT,
        "schedulingPolicy": SCHEDULING,
        "suspend": TRUTH,
        "managedBy": TEXT,
    }
)


def replicas(count: Mapping[str, object]) -> dict[str, object]:
    policy = one_of("Never", "OnFailure")
    return closed({"replicas": dict(count), "restartPolicy": policy, "template": TEMPLATE}, "template")


MPI_JOB = closed(
    {
        "slotsPerWorker": {"type": "integer", "minimum": 1},
        "runLauncherAsWorker": TRUTH,
        "sshAuthMountPath": TEXT,
        "launcherCreationPolicy": one_of("AtStartup", "WaitForWorkersReady"),
        "mpiImplementation": one_of("OpenMPI", "Intel", "MPICH"),
        "runPolicy": RUN_POLICY,
        "mpiReplicaSpecs": closed(
            {"Launcher": replicas({"const": 1}), "Worker": replicas({"type": "integer", "minimum": 1})}, "Launcher"
        ),
    },
    "mpiReplicaSpecs",
)

# trainer.kubeflow.org/v1alpha1, whose templates are those of jobset.x-k8s.io/v1alpha2
MPI_POLICY = closed(
    {
        "numProcPerNode": COUNT,
        "mpiImplementation": one_of("OpenMPI"),
        "sshAuthMountPath": TEXT,
        "runLauncherAsNode": TRUTH,
    }
)
REPLICATED_JOB = closed(
    {
        "name": NAME,
        "dependsOn": listed(closed({"name": NAME, "status": one_of("Ready", "Complete")}, "name", "status")),
        "template": closed({"metadata": METADATA, "spec": closed({"template": TEMPLATE}, "template")}, "spec"),
    },
    "name",
    "template",
)
JOB_SET = closed(
    {
        "network": closed({"publishNotReadyAddresses": TRUTH}),
        "successPolicy": closed({"operator": one_of("All", "Any"), "targetReplicatedJobs": TEXTS}, "operator"),
        "replicatedJobs": listed(REPLICATED_JOB, 1),
    },
    "replicatedJobs",
)
RUNTIME = closed(
    {
        "mlPolicy": closed({"numNodes": COUNT, "mpi": MPI_POLICY}),
        "template": closed({"metadata": METADATA, "spec": JOB_SET}, "spec"),
    },
    "template",
)
REFERENCE = closed(
    {"apiGroup": TEXT, "kind": one_of("TrainingRuntime", "ClusterTrainingRuntime"), "name": NAME}, "name"
)
TRAIN_JOB = closed(
    {
        "runtimeRef": REFERENCE,
        "trainer": closed({"numNodes": COUNT, "image": TEXT, "command": TEXTS, "args": TEXTS}),
    },
    "runtimeRef",
)

# Kubernetes itself
SERVICE = closed(
    {"clusterIP": TEXT, "publishNotReadyAddresses": TRUTH, "selector": LABELS},
    "selector",
)
JOB = closed(
    {
        "completionMode": one_of("NonIndexed", "Indexed"),
        "completions": COUNT,
        "parallelism": COUNT,
        "backoffLimit": COUNT,
        "template": TEMPLATE,
    },
    "template",
)


def kind(version: str, name: str, spec: Mapping[str, object]) -> dict[str, object]:
    fields = {"apiVersion": {"const": version}, "kind": {"const": name}, "metadata": METADATA, "spec": dict(spec)}
    return closed(fields, *fields)


SCHEMAS: Mapping[str, dict[str, object]] = {
    "MPIJob": kind("kubeflow.org/v2beta1", "MPIJob", MPI_JOB),
    "TrainingRuntime": kind("trainer.kubeflow.org/v1alpha1", "TrainingRuntime", RUNTIME),
    "TrainJob": kind("trainer.kubeflow.org/v1alpha1", "TrainJob", TRAIN_JOB),
    "Service": kind("v1", "Service", SERVICE),
    "Job": kind("batch/v1", "Job", JOB),
}
