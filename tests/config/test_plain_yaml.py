"""YAML of a stranger: small in the file, and no larger in memory."""

import pytest
import yaml

from trainer.config.overrides import read_yaml


def test_aliases_that_stand_for_billions_of_values_are_refused():
    lines = ["a0: &a0 [x, x, x, x]"]
    lines += [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}, *a{i - 1}, *a{i - 1}]" for i in range(1, 26)]
    for text in ("\n".join(lines), "a: &a [*a]", "a: &a {b: *a}"):
        with pytest.raises(yaml.YAMLError, match="its aliases make more than"):
            read_yaml(text)
    assert read_yaml("a: &a [1, 2]\nb: *a\n") == {"a": [1, 2], "b": [1, 2]}
