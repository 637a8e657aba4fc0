"""An export, and imports of the helper module here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of a policy that answers every kind of decision."""
    pytest.importorskip("torch")
    from networks import ALL_KINDS, some_scorer

    from fleetpilot.agents.export import export_policy

    folder = tmp_path_factory.mktemp("exports") / "policy"
    export_policy(some_scorer(ALL_KINDS), ALL_KINDS, folder, fallback="llumnix", mode="greedy", provenance={"by": "us"})
    return folder
