"""Where the command's tests run."""

import pytest


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """No test writes into the repository, and none reads a machine's own data folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ELLE_DATA", raising=False)
