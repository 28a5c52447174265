"""Choice of the environments and the versions that tools/oldest.py installs."""

import oldest
import pytest


def test_lower_bounds_become_pins() -> None:
    assert oldest.lowest(["pandas>=2.2,<3", "rich>=13", "a>=1; platform_machine == 'x86_64'"]) == [
        "a==1",
        "pandas==2.2",
        "rich==13",
    ]
    with pytest.raises(SystemExit, match=r"'fsspec' in pyproject\.toml has no lower bound"):
        oldest.lowest(["fsspec"])


def test_every_framework_has_an_environment_with_its_pin() -> None:
    for name in (
        "jax",
        "keras",
        "mxnet",
        "prometheus-client",
        "pyspark",
        "optuna",
        "tensorboard",
        "tensorflow",
        "torch",
    ):
        pins = [pin for environment in oldest.ENVIRONMENTS.values() for pin in oldest.promised(environment)]
        assert any(oldest.name_of(pin) == name for pin in pins), name


def test_environments_that_others_name_run_only_if_asked() -> None:
    assert set(oldest.choose([])) == {"jax", "libraries", "tensorflow", "torch"}
    assert set(oldest.choose(["spark", "jax"])) == {"jax", "spark"}


def test_a_version_replaces_the_lower_bound() -> None:
    ((name, (environment, pins)),) = oldest.choose(["tensorflow==2.19.1"]).items()
    assert (name, environment) == ("tensorflow-2.19.1", oldest.ENVIRONMENTS["tensorflow"])
    assert [pin for pin in pins if pin.startswith("tensorflow")] == ["tensorflow==2.19.1"]
    with pytest.raises(SystemExit, match="libraries has no version of its own"):
        oldest.choose(["libraries==1"])
    with pytest.raises(SystemExit, match="caffe is unknown; choose from libraries, jax"):
        oldest.choose(["caffe"])


def test_each_environment_names_tests_that_exist() -> None:
    for environment in oldest.ENVIRONMENTS.values():
        for pattern in environment.tests:
            assert list(oldest.ROOT.glob(pattern)), pattern
