"""What all tests share: the environment in which torch is imported, and the command line."""

import os

import pytest

# Else the compiler starts a pool of processes that outlives the test which asked for it.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


@pytest.fixture
def models(tmp_path):
    """Path of a file with models for the command line."""
    import command_line

    return command_line.write_models(tmp_path)


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command line in this process."""
    import command_line

    return command_line.runner(monkeypatch, capsys)


@pytest.fixture
def all_functions(monkeypatch):
    """Trace functions in small modules, too."""
    monkeypatch.setattr("autoremat._record_calls.MIN_SHARE", 0)
