"""Recipe files are read as the real OmegaConf reads them for LLaMA-Factory."""

import io
import math
import os
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpofit.errors import BadInput
from dpofit.recipe.interpolation import InterpolationError, resolve
from dpofit.recipe.overrides import merge, parse_overrides
from dpofit.recipe.yaml_file import read_document

pytestmark = pytest.mark.stack
omegaconf = pytest.importorskip("omegaconf")

SCALARS = [
    "1e-6",
    "1E5",
    "5e8",
    "-1e-3",
    "1.",
    ".5",
    ".5e3",
    ".5e+3",
    "1_000",
    "1_0.5",
    "0x1F",
    "0o10",
    "010",
    "1:30",
    "1:30.5",
    "yes",
    "No",
    "on",
    "OFF",
    "y",
    "n",
    "true",
    "TRUE",
    "null",
    "~",
    "Null",
    "",
    "nan",
    ".nan",
    "inf",
    "-.inf",
    "+.inf",
    "2024-01-01",
    "2024-01-01 10:00:00",
    "1e",
    "e5",
    "1e-6e",
    "+1",
    "-0",
    "+.5",
    "1__0",
    "0b11",
    "1e+5",
    "1.5e5",
    "auto",
    "'1e-6'",
    '"true"',
    "!!str 1e-6",
    "!!int '3'",
    "!!float 3",
    "[1e-6, a]",
    "{a: 1e-6}",
    "a: b",
    "@x",
    "%x",
    "`x`",
    "???",
    "q_proj,v_proj",
    "C:/data",
    "~/x",
    "/p q/r",
    "- x",
    "# c",
    "a # c",
    "&a 1",
    "*a",
    "!!binary aGk=",
]
DOCUMENTS = [
    "a: 1\na: 2\n",
    "a: {b: 1, b: 2}\n",
    "1: 2\n1: 3\n",
    "true: 3\n",
    "1.5: 3\n",
    "null: 3\n",
    "? [1, 2]\n: 3\n",
    "a: &x {b: 1}\nc:\n  <<: *x\n  b: 2\n",
    "a: &x {b: 1}\nd: &y {b: 2, e: 3}\nc:\n  <<: [*x, *y]\n",
    "a: &x [*x]\n",
    "a: !!set {a, b}\n",
    "a: !!python/tuple [1]\n",
    "a: !!timestamp 2024-01-01\n",
    "a: 1\n---\nb: 2\n",
    "\t",
    "=: 3\n",
    "a: =\n",
    "",
    "# only a comment\n",
    "---\n",
    "--- \na: 1\n...\n",
    "a: |\n  x\n  y\n",
    "a: >-\n  x\n  y\n",
    "a:\n- 1\n- 2\n",
    "a:\n",
    "a: [1, [2, {b: 1e-6}]]\n",
    "%YAML 1.1\n---\na: 1\n",
    "a: {<<: {b: 1}, c: 2}\n",
    "a: &x 3\nb: *x\n",
    "a: *nothing\n",
    "a: 'x\n",
    "a: [1\n",
    "a: b: c\n",
    " a: 1\nb: 2\n",
    "\ufeffa: 1\n",
    'a: "\\u00e9"\n',
    "a: é\n",
]


def theirs(text: str):
    """What read_args of llamafactory 0.9.5 (hparams/parser.py 91-93) gives; None when it refuses."""
    try:
        loaded = omegaconf.OmegaConf.load(io.StringIO(text))
        return omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.merge(loaded, omegaconf.OmegaConf.create()))
    except Exception:
        return None


def ours(text: str, folder):
    path = folder / "r.yaml"
    path.write_text(text, encoding="utf-8")
    try:
        return read_document(path).values
    except BadInput:
        return None


def same(left, right) -> bool:
    if isinstance(left, dict) and isinstance(right, dict):
        return [*left] == [str(key) for key in right] and all(same(left[str(key)], right[key]) for key in right)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left):
        return math.isnan(right)
    return type(left) is type(right) and left == right


@pytest.mark.parametrize("scalar", SCALARS)
def test_a_scalar_has_omegaconfs_type_and_value(scalar, tmp_path):
    text = f"a: {scalar}\n"
    assert same(ours(text, tmp_path), theirs(text)) or ours(text, tmp_path) is theirs(text) is None


@pytest.mark.parametrize("text", DOCUMENTS)
def test_a_document_is_accepted_or_refused_as_by_omegaconf(text, tmp_path):
    assert same(ours(text, tmp_path), theirs(text)) or ours(text, tmp_path) is theirs(text) is None


@settings(max_examples=300, deadline=None)
@given(scalar=st.text(alphabet="0123456789.eE+-_:xob~ynTtrufalsinf", min_size=1, max_size=8))
def test_any_number_like_scalar_has_omegaconfs_type_and_value(scalar, tmp_path_factory):
    text = f"a: {scalar}\n"
    folder = tmp_path_factory.getbasetemp()
    assert same(ours(text, folder), theirs(text)) or ours(text, folder) is theirs(text) is None


@settings(max_examples=150, deadline=None)
@given(
    value=st.recursive(
        st.one_of(
            st.integers(),
            st.floats(allow_nan=False),
            st.booleans(),
            st.none(),
            st.text(string.ascii_letters + " -:#,'\"", max_size=8),
        ),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.text(string.ascii_letters, min_size=1, max_size=4), inner, max_size=3),
        ),
        max_leaves=8,
    )
)
def test_what_yaml_writers_write_reads_back_as_by_omegaconf(value, tmp_path_factory):
    import yaml

    text = yaml.safe_dump({"key": value})
    assert same(ours(text, tmp_path_factory.getbasetemp()), theirs(text))


OVERRIDES = [
    ["a=1"],
    ["a=1e-6"],
    ["a=null"],
    ["a="],
    ["a=true"],
    ["a=yes"],
    ["a=[1,2]"],
    ["a=[q_proj, v_proj]"],
    ["a.b=1"],
    ["a.b=1", "a.c=2"],
    ["a=1", "a=2"],
    ["a=x=y"],
    ["a='1'"],
    ["a={b: 1}"],
    ["a={b: 1}", "a.c=2"],
    ["a=q,v"],
    ["a[b]=1"],
    ["a.b.c=[1]"],
    ["a=http://x?y=z"],
    ["a= 1 "],
    ["a=/p q"],
    ["a.b=1", "a=2"],
    ["a=2", "a.b=1"],
]


@pytest.mark.parametrize("arguments", OVERRIDES, ids=" ".join)
def test_overrides_are_parsed_and_merged_as_by_from_cli(arguments):
    conf = omegaconf.OmegaConf
    for base in ({"kept": 3}, {"a": 5}, {"a": {"z": 1}}, {"a": [7]}):
        try:
            expected = conf.to_container(conf.merge(conf.create(base), conf.from_cli(arguments)))
        except TypeError:  # a list for a mapping, or the other way round
            with pytest.raises(BadInput):
                merge(base, parse_overrides(arguments))
        else:
            assert merge(base, parse_overrides(arguments)) == expected


INTERPOLATIONS = [
    "${name}",
    "a/${name}",
    "${name}/${number}",
    "${number}",
    "${nested.inner}",
    "${nested[inner]}",
    "${nested}",
    "${list}",
    "${list[0]}",
    "${list.1}",
    "${oc.env:HERE}",
    "${oc.env:NOT_SET}",
    "${oc.env:NOT_SET,fallback}",
    "${oc.env:NOT_SET,3}",
    "${oc.env:NOT_SET,null}",
    "${oc.env:NOT_SET,'a b'}",
    "${oc.env:NOT_SET,${name}}",
    "x-${oc.env:HERE}-y",
    r"\${name}",
    r"\\${name}",
    r"a\b${name}",
    "$name",
    "${missing}",
    "${name",
    "${}",
    "${.number}",
    "${..number}",
    "${which}",
    "${${which}}",
    "${oc.select:name}",
    "${oc.select:missing,7}",
    "${oc.select:missing}",
    "${oc.decode:${digits}}",
    "${oc.unknown:1}",
    "${loop_a}",
    "${ name }",
    "${switch}",
    "${nothing}",
    "v${nothing}",
    "${oc.env:NOT_SET,1e-6}",
    "${oc.env:NOT_SET,true}",
    "${nested.sibling}",
    "${deep.chain}",
    "$${name}",
    "${name}}",
    "{${name}}",
    "${oc.env: HERE }",
    "${name}\\",
    "${list[5]}",
]
TREE = {
    "name": "qwen",
    "number": 7,
    "nested": {"inner": 1e-6, "sibling": "${.inner}", "up": "${..name}"},
    "list": ["x", "${name}"],
    "which": "name",
    "digits": "12",
    "switch": True,
    "nothing": None,
    "loop_a": "${loop_b}",
    "loop_b": "${loop_a}",
    "deep": {"chain": "${nested.up}"},
}


@pytest.mark.parametrize("text", INTERPOLATIONS)
def test_an_interpolation_resolves_as_in_omegaconf(text, monkeypatch):
    monkeypatch.setenv("HERE", "there")
    tree = {**TREE, "key": text}
    try:
        config = omegaconf.OmegaConf.create({"key": text, **{k: v for k, v in TREE.items()}})
        value = config.key
        expected = (
            omegaconf.OmegaConf.to_container(value, resolve=True) if omegaconf.OmegaConf.is_config(value) else value
        )
    except Exception:
        with pytest.raises(InterpolationError):
            resolve(tree, os.environ, "key")
        return
    assert resolve(tree, os.environ, "key") == expected
