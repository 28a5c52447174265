"""Registration of the backend by `import torch`, which must not fail whatever is wrong with farandole."""

import logging
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from farandole.integrations import torch_backend

ASK = """
import sys
sys.modules["farandole._native"] = None  # the extension cannot be loaded
import torch
import torch.distributed as dist

def ask():
    try:
        dist.init_process_group("farandole", store=dist.HashStore(), rank=0, world_size=1)
    except Exception as error:
        print(type(error).__name__, error)

ask()
del sys.modules["farandole._native"]
ask()
"""


def test_an_unusable_backend_says_why_when_it_is_asked_for() -> None:
    spoilt = {"FARANDOLE_COLLECTIVE_TIMEOUT": "soon", "LD_LIBRARY_PATH": "/nowhere"}
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=os.environ | spoilt, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    extension, setting = done.stdout.splitlines()
    assert extension.startswith('ImportError the backend "farandole" cannot be loaded with torch')
    assert "_native" in extension and 'use backend="gloo"' in extension
    assert setting.startswith("ConfigError FARANDOLE_COLLECTIVE_TIMEOUT: 'soon' is no duration")


def test_a_torch_that_refuses_the_backend_is_imported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(name: str) -> None:
        """Take other arguments, as another version of torch may do."""

    monkeypatch.setattr(dist.Backend, "register_backend", refuse)
    with caplog.at_level(logging.INFO):
        torch_backend.register()
    assert "cannot be registered with torch" in caplog.text
