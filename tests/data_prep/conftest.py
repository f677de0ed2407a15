"""What all tests of data preparation share."""

import pytest

from data_prep.ingest import hub_files
from trainer.system.backoff import Backoff


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """A hub that is away is asked twice at once, not for minutes."""
    monkeypatch.setattr(hub_files, "PATIENT", Backoff(attempts=2, first_wait_s=0.01))
