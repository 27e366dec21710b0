"""Whatever stands in a recipe or its DeepSpeed config, the answer is findings or bad input, never a traceback."""

import contextlib
import random
import string
from pathlib import Path

import pytest

from dpofit.errors import BadInput
from dpofit.recipe.check import check_recipe
from dpofit.recipe.keys import deepspeed_keys, known_keys

STRANGE = [
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    1.5,
    -0.5,
    1e308,
    10**30,
    float("nan"),
    float("inf"),
    "",
    " ",
    "auto",
    "no",
    "true",
    "a,b",
    "0.5,x",
    "{",
    '{"a": 1}',
    "${x}",
    "${oc.env:HOME}",
    "${",
    "???",
    "\u0000",
    "é" * 50,
    "/nowhere",
    "../x",
    [],
    [None],
    [1, [2]],
    ["a", "b"],
    {},
    {"a": {"b": [1]}},
    {1: 2},
    {"use_reentrant": "x"},
    [{"a": 1}],
    "qwen",
    "/",
]


def answers(path: str) -> None:
    with contextlib.suppress(BadInput):
        check_recipe(path, (), {})


@pytest.mark.parametrize("seed", range(8))
def test_strange_values_anywhere(seed, write):
    chance = random.Random(seed)
    for _ in range(60):
        answers(
            write(**{key: chance.choice(STRANGE) for key in chance.sample(sorted(known_keys()), chance.randint(1, 6))})
        )


def test_every_strange_value_in_every_key(write):
    keys = sorted(known_keys())
    for value in STRANGE:
        answers(write(**dict.fromkeys(keys, value)))
    for number, key in enumerate(keys):
        answers(write(**{key: STRANGE[number % len(STRANGE)]}))


@pytest.mark.parametrize("seed", range(4))
def test_strange_deepspeed_configs(seed, write):
    chance = random.Random(seed)
    names = {
        section: sorted(deepspeed_keys(section))
        for section in ("zero_optimization", "offload_optimizer", "offload_param")
    }
    top = [
        "zero_optimization",
        "bf16",
        "fp16",
        "optimizer",
        "scheduler",
        "train_batch_size",
        "gradient_clipping",
        "data_types",
        "x",
    ]
    for _ in range(60):
        zero = {key: chance.choice(STRANGE) for key in chance.sample(names["zero_optimization"], 6)}
        for section in ("offload_optimizer", "offload_param"):
            zero[section] = {key: chance.choice(STRANGE) for key in chance.sample(names[section], 3)}
        config = {key: chance.choice(STRANGE) for key in chance.sample(top, 4)}
        if chance.random() < 0.7:
            config["zero_optimization"] = zero
        answers(write(deepspeed=config))


@pytest.mark.parametrize("seed", range(4))
def test_mutilated_files(seed, write, tmp_path):
    chance = random.Random(seed)
    text = Path(write(deepspeed={"zero_optimization": {"stage": 3}})).read_text()
    path = tmp_path / "mutilated.yaml"
    for _ in range(100):
        mutilated = list(text)
        for _ in range(chance.randint(1, 5)):
            place = chance.randrange(len(mutilated))
            mutilated[place] = chance.choice(
                [*string.punctuation, "\n", "\t", " ", "", "- ", ": ", "&a ", "*a ", "<<: "]
            )
        path.write_text("".join(mutilated), encoding="utf-8")
        answers(str(path))
