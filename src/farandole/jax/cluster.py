"""Jobs of farandole as a cluster of JAX's: `jax.distributed.initialize()` needs no arguments in their ranks."""

from jax._src.clusters import ClusterEnv  # JAX's own clusters derive from it, too

from farandole.topology import JobEnvironment


class FarandoleCluster(ClusterEnv):  # type: ignore[no-untyped-call]
    """The ranks that `farandole run` has started; deriving from `ClusterEnv` registers it with JAX.

    JAX takes the first cluster that it finds, so in an allocation of Slurm this needs
    `cluster_detection_method="farandole"`."""

    name = "farandole"

    @classmethod
    def is_env_present(cls) -> bool:
        """Return whether this process is a rank of a job whose launcher has reserved a port for JAX's coordinator."""
        job = JobEnvironment.read()
        return job is not None and bool(job.torch_store)

    @classmethod
    def get_coordinator_address(
        cls, timeout_secs: int | None = None, override_coordinator_port: str | None = None
    ) -> str:
        """Return "host:port" of rank 0, with the port that the launcher has reserved or the one given."""
        host, _, port = _job().torch_store.rpartition(":")
        return f"{host}:{override_coordinator_port or port}"

    @classmethod
    def get_process_count(cls) -> int:
        """Return the number of ranks."""
        return _job().size

    @classmethod
    def get_process_id(cls) -> int:
        """Return the number of this rank."""
        return _job().rank

    @classmethod
    def get_local_process_id(cls) -> int | None:
        """Return the number of this rank on its host, by which JAX gives it a GPU of its own."""
        return _job().local_rank


def _job() -> JobEnvironment:
    job = JobEnvironment.read()
    assert job is not None
    return job
