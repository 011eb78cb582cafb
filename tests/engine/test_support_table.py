"""docs/support.md names every field of SamplingParams and only tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from vllm import SamplingParams

ROOT = Path(__file__).parent.parent.parent
TABLE = (ROOT / "docs" / "support.md").read_text()
KINDS = ("tree", "chain", "refused", "not relevant")


def fields(section: str) -> dict[str, str]:
    """Field name to what it is verified as, from the table under a heading."""
    body = TABLE.split(f"## {section}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("| ").split(" | ") for line in body.splitlines() if line.startswith("| `")]
    return {name: kind for names, kind, *_ in rows for name in re.findall(r"`(\w+)`", names)}


def public_fields() -> set[str]:
    return {field.name for field in msgspec.structs.fields(SamplingParams) if not field.name.startswith("_")}


def test_every_field_of_sampling_params_is_in_the_table():
    listed = fields("Fields of `SamplingParams`")
    assert public_fields() - listed.keys() == set()
    assert listed.keys() - public_fields() == set(), "not fields of this vLLM"
    assert [name for name, kind in listed.items() if not kind.startswith(KINDS)] == []


def test_a_field_that_is_missing_is_noticed(monkeypatch):
    monkeypatch.setitem(globals(), "TABLE", TABLE.replace("`top_k`", "`top_kk`"))
    with pytest.raises(AssertionError):
        test_every_field_of_sampling_params_is_in_the_table()


def test_every_backend_of_structured_output_is_in_the_table():
    from typing import get_args

    from vllm.config.structured_outputs import StructuredOutputsBackend

    body = TABLE.split("## Structured output\n", 1)[1].split("\n## ", 1)[0]
    assert [name for name in get_args(StructuredOutputsBackend) if f"`{name}`" not in body] == []


def test_tests_named_in_the_table_exist():
    named = re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", TABLE)
    assert len(named) > 20
    for file, test in named:
        source = (ROOT / "tests" / "engine" / file).read_text()
        assert not test or f"def {test}(" in source, f"{file}::{test}"
