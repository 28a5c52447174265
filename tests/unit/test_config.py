"""Settings: who wins, what is refused, and with which words."""

import logging
import re
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.config import FABRICS, LOG_LEVELS, ROUTES, Config
from farandole.core.wiring.gpus import kinds_by_route
from farandole.errors import ConfigError
from farandole.refusals import IGNORED_VARIABLES, NEEDLESS_VARIABLES
from farandole.settings import Setting

durations = st.integers(0, 10**13).map(lambda count: timedelta(microseconds=count))
texts = st.none() | st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1)
VALUES: dict[str, st.SearchStrategy[object]] = {
    "bytes": st.integers(64, 1 << 14).map(lambda count: 64 * count),
    "count": st.integers(0, (1 << 31) - 1),
    "duration": durations,
    "flag": st.booleans(),
    "fabric": st.sampled_from(FABRICS),
    "route": st.sampled_from(ROUTES),
    "level": st.sampled_from(LOG_LEVELS),
    "text": texts,
}


@st.composite
def configs(draw: st.DrawFn) -> Config:
    values: dict[str, Any] = {each.name: draw(VALUES[each.kind.name]) for each in Config.settings()}
    values["start_timeout"] = max(values["start_timeout"], timedelta(microseconds=1))
    for name in ("autotune_steps_per_sample", "autotune_max_samples"):
        values[name] = max(1, values[name])
    if values["stall_shutdown_time"] < values["stall_check_time"]:
        values["stall_shutdown_time"] = timedelta(0)
    return Config(**values)


def test_defaults() -> None:
    config = Config()
    assert config.fusion_threshold == 128 * 1024 * 1024
    assert config.spin == timedelta(microseconds=100)
    assert config.collective_timeout == timedelta(minutes=10)
    assert config.timeline is None
    assert Config.from_environment({}) == config


def test_argument_beats_environment_beats_horovod_beats_default() -> None:
    env = {"HOROVOD_FUSION_THRESHOLD": "1"}
    assert Config.from_environment(env).fusion_threshold == 1
    env["FARANDOLE_FUSION_THRESHOLD"] = "2"
    assert Config.from_environment(env).fusion_threshold == 2
    assert Config.from_environment(env, fusion_threshold=3).fusion_threshold == 3
    assert Config.from_environment(env, fusion_threshold=None).fusion_threshold == 2


def test_an_empty_variable_counts_as_not_set() -> None:
    assert Config.from_environment({"FARANDOLE_TIMELINE": "", "HOROVOD_TIMELINE": "t.json"}).timeline == "t.json"


def test_reads_this_process_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARANDOLE_CACHE_CAPACITY", "7")
    assert Config.from_environment().cache_capacity == 7


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("600", 600), ("1.5", 1.5), ("250ms", 0.25), ("100us", 0.0001), ("2m", 120), ("2 min", 120), ("1h", 3600)],
)
def test_durations(text: str, seconds: float) -> None:
    want = timedelta(seconds=seconds)
    assert Config.from_environment({"FARANDOLE_COLLECTIVE_TIMEOUT": text}).collective_timeout == want
    assert Config.from_environment({}, collective_timeout=seconds).collective_timeout == want


@pytest.mark.parametrize(
    ("text", "count"), [("8192", 8192), ("64KiB", 1 << 16), ("64 kb", 64000), ("128MiB", 1 << 27), ("1GiB", 1 << 30)]
)
def test_sizes(text: str, count: int) -> None:
    assert Config.from_environment({"FARANDOLE_FUSION_THRESHOLD": text}).fusion_threshold == count


@pytest.mark.parametrize(("text", "value"), [("1", True), ("Yes", True), ("on", True), ("0", False), ("false", False)])
def test_flags(text: str, value: bool) -> None:
    assert Config.from_environment({"HOROVOD_STALL_CHECK_DISABLE": text}).stall_check_disable is value


BAD_VARIABLES = [
    ("FARANDOLE_FUSION_THRESHOLD", "lots", "'lots' is no bytes; write a whole number >= 0"),
    ("FARANDOLE_FUSION_THRESHOLD", "-1", "'-1' is no bytes"),
    ("HOROVOD_CACHE_CAPACITY", "16KiB", "'16KiB' is no count"),
    ("FARANDOLE_SPIN", "100 years", "'100 years' is no duration; write seconds, or a number with us, ms, s, m or h"),
    ("FARANDOLE_COLLECTIVE_TIMEOUT", "-3", "'-3' is no duration"),
    ("FARANDOLE_COLLECTIVE_TIMEOUT", "9" * 30, "is no duration"),
    ("FARANDOLE_CACHE_CAPACITY", "9" * 5000, "'99999999999999999999'... has 5000 digits"),
    ("HOROVOD_LOG_LEVEL", "loud", "unknown level 'loud'; use one of trace, debug, info, warning, error, fatal"),
    ("HOROVOD_STALL_CHECK_DISABLE", "perhaps", "'perhaps' is neither yes (1, true, yes, on) nor no"),
]


@pytest.mark.parametrize(("variable", "text", "problem"), BAD_VARIABLES)
def test_a_bad_variable_is_named(variable: str, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)) as caught:
        Config.from_environment({variable: text})
    assert caught.value.setting == variable


BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"fusion_threshold": -1}, "fusion_threshold: must be >= 0, got -1"),
    ({"fusion_threshold": 1.5}, "fusion_threshold: must be a whole number, got 1.5"),
    ({"cache_capacity": True}, "cache_capacity: must be a whole number, got True"),
    ({"spin": 1}, "spin: must be a timedelta, got 1"),
    ({"spin": timedelta(seconds=-1)}, "spin: must be >= 0, got -1 s"),
    ({"start_timeout": timedelta(0)}, "start_timeout: must be > 0, got 0 s"),
    ({"timeline": ""}, "timeline: must be a non-empty text or None, got ''"),
    ({"timeline_mark_cycles": 1}, "timeline_mark_cycles: must be True or False, got 1"),
    ({"log_level": "loud"}, "log_level: unknown level 'loud'; use one of trace,"),
    ({"log_level": 3}, "log_level: must be a text, got 3"),
    ({"fabric": "udp"}, "fabric: unknown fabric 'udp'; use one of auto, tcp, mpi"),
    ({"slot_bytes": 100}, "slot_bytes: must be at least 4096 and a multiple of 64, got 100"),
    ({"slot_bytes": 5000}, "slot_bytes: must be at least 4096 and a multiple of 64, got 5000"),
    ({"link_chunk": 4000}, "link_chunk: must be at least 4096 and a multiple of 64, got 4000"),
    ({"fusion_threshold": 1 << 64}, f"fusion_threshold: must be at most {1 << 40}, got {1 << 64}"),
    ({"slot_bytes": 1 << 40}, f"slot_bytes: must be at most {64 << 20}, got {1 << 40}"),
    ({"link_chunk": 2 << 20}, f"link_chunk: must be at most {1 << 20}, got {2 << 20}"),
    ({"cache_capacity": 1 << 40}, f"cache_capacity: must be at most {(1 << 31) - 1}, got {1 << 40}"),
    ({"collective_timeout": timedelta(days=400)}, "collective_timeout: must be at most 365 days, got 3.456e+07 s"),
    ({"autotune_steps_per_sample": 0}, "autotune_steps_per_sample: must be >= 1, got 0"),
    ({"autotune_max_samples": 0}, "autotune_max_samples: must be >= 1, got 0"),
    (
        {"stall_shutdown_time": timedelta(seconds=5)},
        "stall_shutdown_time: must be 0 or at least stall_check_time (60 s), got 5 s",
    ),
]


@pytest.mark.parametrize(("arguments", "problem"), BAD_ARGUMENTS, ids=lambda each: str(each)[:40])
def test_a_bad_argument_is_named(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        Config(**arguments)


@pytest.mark.parametrize(("said", "fabric"), [("MPI", "mpi"), ("Gloo", "tcp"), ("auto", "auto")])
def test_the_fabric_that_horovods_variable_chooses(said: str, fabric: str) -> None:
    assert Config.from_environment({"HOROVOD_CPU_OPERATIONS": said}).fabric == fabric


def test_the_routes_that_horovods_variables_choose() -> None:
    config = Config.from_environment({"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_GPU_BROADCAST": "MPI"})
    assert (config.gpu_allreduce, config.gpu_broadcast) == ("nccl", "host")
    assert (config.gpu_allgather, config.gpu_alltoall, config.gpu_reducescatter) == ("nccl", "nccl", "nccl")
    assert kinds_by_route(config, "host") == ["broadcast"]
    assert kinds_by_route(config, "nccl") == ["allreduce", "allgather", "alltoall", "reducescatter"]
    assert kinds_by_route(Config(), "host") == kinds_by_route(Config(), "nccl") == []
    with pytest.raises(ConfigError, match="HOROVOD_GPU_OPERATIONS: unknown route 'DDL'; use one of auto, nccl, host"):
        Config.from_environment({"HOROVOD_GPU_OPERATIONS": "DDL"})


def test_a_fabric_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="HOROVOD_CPU_OPERATIONS: unknown fabric 'CCL'; use one of auto, tcp, mpi"):
        Config.from_environment({"HOROVOD_CPU_OPERATIONS": "CCL"})


def test_an_unknown_setting_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"fusion_bytes: no such setting; .*fusion_threshold, cache_capacity"):
        Config.from_environment({}, fusion_bytes=1)


@given(configs())
def test_a_child_process_gets_the_same_settings(config: Config) -> None:
    assert Config.from_environment(config.environment()) == config


def test_what_is_given_is_not_free_to_be_tuned_in_child_processes_either() -> None:
    said = Config.from_environment({"HOROVOD_FUSION_THRESHOLD": str(128 << 20), "FARANDOLE_SLOT_BYTES": ""})
    for config in (said, Config.from_environment(said.environment()), Config(fusion_threshold=1)):
        assert not config.leaves_free("fusion_threshold")
        assert config.leaves_free("slot_bytes")


@given(st.text(max_size=12), st.sampled_from([each for each in Config.settings() if each.kind.name != "text"]))
def test_any_text_is_a_value_or_a_config_error(text: str, setting: Setting) -> None:
    try:
        value = setting.parse(text)
    except ConfigError as error:
        assert error.setting == setting.name
    else:
        assert setting.parse(setting.spell(value)) == value


def test_variables_without_meaning_are_named_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="farandole.config"):
        Config.from_environment(dict.fromkeys(IGNORED_VARIABLES, "1"))
    [record] = caplog.records
    for name in IGNORED_VARIABLES:
        assert name in record.getMessage()


def test_a_slip_in_a_name_is_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="farandole.config"):
        Config.from_environment({"FARANDOLE_COLECTIVE_TIMEOUT": "5"})
        Config.from_environment({"HOROVOD_TIMELIEN": "t.json"})
    assert "FARANDOLE_COLECTIVE_TIMEOUT (did you mean FARANDOLE_COLLECTIVE_TIMEOUT?)" in caplog.text
    assert "HOROVOD_TIMELIEN (did you mean HOROVOD_TIMELINE?)" in caplog.text


def test_names_with_the_other_prefix_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    slips = {
        "HOROVOD_COLLECTIVE_TIMEOUT": "FARANDOLE_COLLECTIVE_TIMEOUT",
        "HOROVOD_STALL_CHECK_TIME": "FARANDOLE_STALL_CHECK_TIME",
        "FARANDOLE_GPU_OPERATIONS": "HOROVOD_GPU_OPERATIONS",
        "FARANDOLE_GLOO_IFACE": "HOROVOD_GLOO_IFACE",
    }
    with caplog.at_level(logging.WARNING, logger="farandole.config"):
        Config.from_environment(dict.fromkeys(slips, "1"))
    assert len(caplog.records) == 1
    for slip, meant in slips.items():
        assert f"{slip} (did you mean {meant}?)" in caplog.text


@pytest.mark.parametrize(
    "place", [{"FARANDOLE_RANK": "0"}, {"OMPI_COMM_WORLD_RANK": "1"}, {"SLURM_PROCID": "3"}, {"RANK": "1"}]
)
def test_one_process_of_a_job_warns(place: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="farandole.config"):
        Config.from_environment({"FARANDOLE_TIMELIEN": "t.json", "HOROVOD_CYCLE_TIME": "1", **place})
        assert not caplog.records
        first = dict.fromkeys(place.keys() - {"FARANDOLE_RANK"}, "0")
        Config.from_environment({"FARANDOLE_TIMELIEN": "t.json", **first})
        assert len(caplog.records) == 1


def test_job_variables_and_known_settings_give_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    names = ["RANK", "SIZE", "LOCAL_RANK", "CROSS_SIZE", "RENDEZVOUS", "SECRET", "GENERATION", "JOB", "WORKER_FD"]
    Config.from_environment({f"FARANDOLE_{name}": "1" for name in names} | {"HOROVOD_RANK": "1", "FARANDOLE_SPIN": "0"})
    Config.from_environment(dict.fromkeys(NEEDLESS_VARIABLES, "1"))
    assert caplog.text == ""


def test_each_setting_is_described() -> None:
    for setting in Config.settings():
        assert setting.help
        assert setting.variables[0] == f"FARANDOLE_{setting.name.upper()}"
        assert all(each.startswith("HOROVOD_") for each in setting.variables[1:])


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Config().spin = timedelta(0)  # type: ignore[misc]
