"""The page of the learned policy: what people write, and what an export and the experiment's tables fill in."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from fleetpilot.agents import SHIPPED, load_policy

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "build_learned.py")))


RUN = {
    "command": "/bin/fleetpilot evaluate --experiment learned --policies 'learned,learned?admission=none' -o /tmp/x",
    "commit": "abc",
    "versions": {"numpy": "2"},
}


def test_the_prose_has_places_for_what_there_is(tool: SimpleNamespace) -> None:
    given = tool.parts(SHIPPED["learned"], RUN, "### What is missed\n")
    page = tool.filled(tool.PROSE.read_text("utf-8"), given)
    assert "[[" not in page
    assert "### What is missed" in page
    assert "fleetpilot evaluate --experiment learned --policies 'learned,learned?admission=none'" in page
    assert "/tmp/x" not in page
    assert "Commit abc; numpy 2." in page
    assert given["curve"].count("**") == 2, "the best validation is marked, and one alone"
    assert "\n\n\n" not in page


def test_results_of_another_export_are_refused(tool: SimpleNamespace, tmp_path: Path) -> None:
    export = SHIPPED["learned"]
    runs = tmp_path / "runs"
    runs.mkdir()
    digest = load_policy("learned").digest  # type: ignore[attr-defined]
    for name, of in {"a-learned-0": "another", "b-learned-0": digest}.items():
        with pytest.raises(ValueError, match="no run of the export"):
            tool.run_of(tmp_path, export)
        (runs / f"{name}.json").write_text(json.dumps({"config": {"policy_digest": of}, "name": name}))
    assert tool.run_of(tmp_path, export)["name"] == "b-learned-0"


def test_a_place_for_what_is_not_there_is_named(tool: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match=r"\[\[weather\]\]: expected one of seed"):
        tool.filled("It was [[weather]].", {"seed": "0"})


def test_ranges_and_tables_of_a_configuration_are_written_out(tool: SimpleNamespace) -> None:
    changes = {"cv": [1.0, 4.0], "reward": {"slo_miss": 3.0}, "scored_requests": 300}
    assert tool.described(changes) == "cv 1 to 4, reward slo_miss 3, scored_requests 300"


def test_the_page_was_written_with_the_prose_as_it_is(tool: SimpleNamespace) -> None:
    """Whoever edits one of both has to run the tool."""
    page, at = tool.PAGE.read_text("utf-8"), 0
    for text in re.split(r"\s*\[\[.+?\]\]\s*", tool.PROSE.read_text("utf-8")):
        found = page.find(re.sub(r"\n{3,}", "\n\n", text).strip(), at)
        assert found >= 0, f"docs/learned.md lacks {text[:80]!r}; run python tools/build_learned.py"
        at = found + len(text.strip())
