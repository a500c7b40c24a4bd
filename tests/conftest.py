"""What all tests share: where the fixtures are, and settings that keep parallel tests honest."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.torch_process import TorchProcesses

# Tests run side by side, so a second thread each would only take turns. Read when torch starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What a shell starts in the background ignores Ctrl-C, and what that starts ignores it, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine must not fail a test: no deadline on single examples.
settings.register_profile(
    "ours", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("ours")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the working tree."""
    return ROOT


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The stored fixture directories. Read-only: copy what a test changes."""
    return ROOT / "fixtures"


@pytest.fixture(scope="session")
def corpus() -> Path:
    """Files that this project did not write. Read-only."""
    return ROOT / "fixtures" / "corpus"


@pytest.fixture(scope="session")
def torch_processes() -> Iterator[TorchProcesses]:
    """Runs programs that use torch, each in a process of its own that begins in milliseconds."""
    preload = ("torch._dynamo", "torchdata.stateful_dataloader", "trainer_core")
    with TorchProcesses(*preload) as running:
        yield running


@pytest.fixture
def fixture_copy(fixtures: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A function that copies one fixture directory by name to where it may be changed."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(fixtures / name, tmp_path / name))

    return copy
