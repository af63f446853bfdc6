"""The base of all registries: who added what, no name twice, and a plugin that fails half-way leaves nothing."""

import pytest

from minivllm_plugin.errors import ConfigError
from minivllm_plugin.extensions import Extensions
from minivllm_plugin.extensions.registry import BUILTIN, Registry


class Things(Registry[object]):
    kind = "thing"

    def add(self, name: str, value: object) -> None:
        self._put(name, value)


def test_names_keep_their_order_and_their_owner() -> None:
    things = Things()
    things.add("c", 3)
    with things.owned_by("acme"):
        things.add("a", 1)
        with things.owned_by("inner"):
            things.add("b", 2)
        things.add("d", 4)
    assert things.names() == ("c", "a", "b", "d")
    assert [things.owner(name) for name in things.names()] == ["this program", "acme", "inner", "acme"]
    assert things.items() == {"c": 3, "a": 1, "b": 2, "d": 4}
    assert (things.get("b"), things.get("x"), things.owner("x")) == (2, None, None)
    assert ("a" in things, "x" in things, len(things)) == (True, False, 4)


def test_a_taken_name_is_refused_naming_both_owners_and_the_same_value_is_not() -> None:
    things = Things()
    with things.owned_by("acme"):
        things.add("a", 1)
        things.add("a", 1)
    with things.owned_by("other"), pytest.raises(ConfigError, match=r"thing 'a' of plugin 'other'.*plugin 'acme'"):
        things.add("a", 2)
    assert things.get("a") == 1
    with things.owned_by("other"):
        things.add("a", 1)
    assert things.owner("a") == "acme"


@pytest.mark.parametrize("name", ["", "  ", None, 3])
def test_a_name_is_a_text(name: str) -> None:
    with pytest.raises(ConfigError, match="non-empty string"):
        Things().add(name, 1)


def test_an_exception_ends_the_ownership() -> None:
    things = Things()
    with pytest.raises(RuntimeError), things.owned_by("acme"):
        raise RuntimeError
    things.add("a", 1)
    assert things.owner("a") == "this program"


def test_what_a_failed_plugin_added_is_taken_out_everywhere() -> None:
    extensions = Extensions.builtin()
    builtin = extensions.models.names()
    for owner in ("good", "bad"):
        with extensions.models.owned_by(owner), extensions.parsers.owned_by(owner), extensions.weights.owned_by(owner):
            extensions.models.add(f"{owner}Model", "package.module:Class")
            extensions.parsers.chat_templates.add(f"{owner}-template", "{{ messages }}")
            extensions.weights.formats.add(f".{owner}", lambda path: path)
    assert extensions.discard_owner("bad") == ("badModel", ".bad", "bad-template")
    assert extensions.models.names() == (*builtin, "goodModel")
    assert extensions.parsers.chat_templates.names() == ("good-template",)
    assert extensions.weights.formats.names() == (".good",)
    assert {extensions.models.owner(name) for name in builtin} == {BUILTIN}


def test_each_engine_has_its_own() -> None:
    first, second = Extensions.builtin(), Extensions.builtin()
    first.models.add("Mine", "package.module:Class")
    assert "Mine" in first.models
    assert "Mine" not in second.models
