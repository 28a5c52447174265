"""The variables of other launchers: which of them tell of processes that each would train alone."""

import pytest

from farandole.errors import ConfigError
from farandole.meeting.rendezvous import SoloRendezvous, TcpRendezvous, from_environment
from farandole.other_launchers import OtherLaunch, find_other_launch, note_launches, refuse_launch_below_member
from farandole.topology import JobEnvironment

SEVERAL = {
    "Open MPI": ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}, "OMPI_COMM_WORLD_SIZE"),
    "MVAPICH": ({"MV2_COMM_WORLD_SIZE": "4"}, "MV2_COMM_WORLD_SIZE"),
    "MVAPICH 3": ({"MVP_COMM_WORLD_SIZE": "2", "MVP_COMM_WORLD_RANK": "0"}, "MVP_COMM_WORLD_SIZE"),
    "jsrun": ({"JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "0", "PMIX_RANK": "0"}, "JSM_NAMESPACE_SIZE"),
    "MPICH": ({"PMI_SIZE": "3", "PMI_RANK": "0", "MPI_LOCALNRANKS": "1"}, "PMI_SIZE"),
    "Intel MPI": ({"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0", "PMI_RANK": "0"}, "MPI_LOCALNRANKS"),
    "mpiexec -pmi-port": ({"PMI_ID": "0", "PMI_PORT": "a:1", "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}, "PMI_ID"),
    "a PMIx rank": ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "prte"}, "PMIX_RANK"),
    "srun": ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, "SLURM_STEP_NUM_TASKS"),
    "a step of srun": ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "SLURM_NTASKS"),
    "a task of srun": ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, "SLURM_NTASKS"),
    "mpirun within srun": ({"SLURM_STEP_NUM_TASKS": "2", "OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE"),
    "Horovod": ({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0"}, "HOROVOD_SIZE"),
    "torchrun": ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}, "WORLD_SIZE"),
}
ALONE = {
    "no launcher": {},
    "mpirun -n 1": {"OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"},
    "mpiexec -n 1": {"PMI_SIZE": "1", "PMI_RANK": "0", "MPI_LOCALNRANKS": "1"},
    "a batch script": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    "a batch script's step": {"SLURM_STEP_ID": "4294967291", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
    "an allocation's shell": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"},
    "srun -n 1 within a larger job": {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "8"},
    "torchrun with one": {"WORLD_SIZE": "1", "RANK": "0"},
    "no numbers": {"WORLD_SIZE": "many", "PMI_SIZE": "", "OMPI_COMM_WORLD_SIZE": "-2"},
}


@pytest.mark.parametrize("launcher", SEVERAL)
def test_a_launch_of_several_is_refused(launcher: str) -> None:
    env, variable = SEVERAL[launcher]
    with pytest.raises(ConfigError) as caught:
        from_environment(env)
    assert caught.value.setting == variable
    assert f"{variable}: is {env[variable]}: " in str(caught.value)
    assert f"farandole run -np {'N' if variable in ('PMIX_RANK', 'PMI_ID') else env[variable]} python" in str(
        caught.value
    )
    assert str(find_other_launch(env)) in str(caught.value)


WAYS = {
    **dict.fromkeys(("Open MPI", "MVAPICH", "MVAPICH 3", "MPICH", "Intel MPI", "mpiexec -pmi-port"), "mpi"),
    "mpirun within srun": "mpi",
    **dict.fromkeys(("srun", "a step of srun", "a task of srun"), "slurm"),
    **dict.fromkeys(("jsrun", "a PMIx rank", "Horovod", "torchrun"), ""),  # this torchrun lacks a port
}
TORCHRUN = {"WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "a", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}
INNERMOST = {
    "torchrun": (TORCHRUN, "WORLD_SIZE", "torch"),
    "torchrun within srun": (SEVERAL["srun"][0] | TORCHRUN, "WORLD_SIZE", "torch"),
    "torchrun within mpirun": (SEVERAL["Open MPI"][0] | TORCHRUN, "WORLD_SIZE", "torch"),
    "variables of torch within mpirun": (
        SEVERAL["Open MPI"][0] | {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        "OMPI_COMM_WORLD_SIZE",
        "mpi",
    ),
    "srun with PMI": (SEVERAL["srun"][0] | {"PMI_SIZE": "2", "PMI_RANK": "0"}, "PMI_SIZE", "slurm"),
    "mpiexec within srun": (SEVERAL["srun"][0] | {"PMI_SIZE": "8", "PMI_RANK": "0"}, "PMI_SIZE", "mpi"),
}


def way_of(found: OtherLaunch) -> str:
    module = found.launcher.meet.partition(":")[0].removesuffix(".distributed.exchange")
    way = module.rpartition(".")[2]
    assert found.by_mpi == (way == "mpi")
    return way


@pytest.mark.parametrize("launcher", SEVERAL)
def test_the_way_in_which_processes_can_meet(launcher: str) -> None:
    found = find_other_launch(SEVERAL[launcher][0])
    assert found is not None and way_of(found) == WAYS[launcher]


@pytest.mark.parametrize("text", [" 2", "2 ", "2\n"])
def test_padded_numbers_are_read(text: str) -> None:
    found = find_other_launch({"WORLD_SIZE": text, "RANK": " 0", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert found is not None and (found.size, way_of(found)) == (2, "torch")


@pytest.mark.parametrize("launcher", INNERMOST)
def test_the_innermost_launcher_counts(launcher: str) -> None:
    env, variable, way = INNERMOST[launcher]
    found = find_other_launch(env)
    assert found is not None and (found.variable, way_of(found)) == (variable, way)


@pytest.mark.parametrize("launcher", ALONE)
def test_a_single_process_is_a_job_of_one_rank(launcher: str) -> None:
    assert isinstance(from_environment(ALONE[launcher]), SoloRendezvous)


def place(size: int = 2, rank: int = 1) -> dict[str, str]:
    job = JobEnvironment(
        rank=rank, size=size, rendezvous="127.0.0.1:4711", secret=b"secret", torch_store="127.0.0.1:4712"
    )
    return job.write(torch_env=True)


@pytest.mark.parametrize("launcher", SEVERAL)
def test_our_own_launcher_below_another(launcher: str) -> None:
    outer = SEVERAL[launcher][0]
    met = from_environment(outer | note_launches(outer) | place())
    assert isinstance(met, TcpRendezvous)
    assert (met.rank, met.size) == (1, 2)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("launcher", SEVERAL)
def test_another_launcher_below_ours_is_refused(launcher: str, size: int) -> None:
    env, variable = SEVERAL[launcher]
    outer = note_launches({"MV2_COMM_WORLD_SIZE": "7"})
    inner = outer | place(size, rank=size - 1) | {"MV2_COMM_WORLD_SIZE": "7"} | env
    if variable == "HOROVOD_SIZE" and size == 1:
        inner["HOROVOD_RANK"] = "1"
    with pytest.raises(ConfigError, match=f"{variable}: is {env[variable]}: "):
        from_environment(inner)


def test_a_rank_without_another_launcher() -> None:
    assert from_environment(place() | note_launches({})).size == 2
    assert from_environment(place(size=1, rank=0)).size == 1


def test_the_sentence() -> None:
    with pytest.raises(ConfigError) as caught:
        from_environment({"OMPI_COMM_WORLD_SIZE": "2"})
    assert str(caught.value) == (
        "OMPI_COMM_WORLD_SIZE: is 2: mpirun of Open MPI started 2 processes, which cannot meet here, and each "
        "would train alone. Start the ranks with: farandole run -np 2 python train.py. To train alone on purpose, "
        "unset OMPI_COMM_WORLD_SIZE"
    )


@pytest.mark.parametrize("launcher", SEVERAL)
def test_another_launcher_below_a_member_of_an_elastic_job_is_refused(launcher: str) -> None:
    env, variable = SEVERAL[launcher]
    places = {"HOROVOD_SIZE": "4", "HOROVOD_RANK": "3", "WORLD_SIZE": "4", "RANK": "3"}
    refuse_launch_below_member(places | env | note_launches(env))
    if variable in places:  # its launcher and its program set them
        refuse_launch_below_member(places | env)
    else:
        with pytest.raises(ConfigError, match=f"{variable}: is {env[variable]}: "):
            refuse_launch_below_member(places | env)


def test_torchrun_below_a_member_of_an_elastic_job_is_refused() -> None:
    with pytest.raises(ConfigError, match="WORLD_SIZE: is 4: torchrun"):
        refuse_launch_below_member(TORCHRUN)
