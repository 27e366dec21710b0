"""`dpofit list` narrowed to a family, a card, or what is predicted to fit a cluster."""

from __future__ import annotations

from dpofit.recipe.cards import all_recipes


def names(ran) -> set[str]:
    return {row["recipe"] for row in ran.json["recipes"]}


def test_family_takes_the_start_of_a_name(dpofit):
    families = {name.partition("/")[0] for name in names(dpofit("list", "--family", "qwen3", "--json"))}
    assert families == {"qwen3-8b-dpo", "qwen3-14b-dpo", "qwen3-32b-dpo"}


def test_an_unknown_family_is_refused_with_the_choices(dpofit):
    ran = dpofit("list", "--family", "gpt")
    assert ran.exit_code == 2 and "llama3.3-70b-dpo, qwen2.5-14b-dpo" in ran.err


def test_gpu_alone_is_the_card_a_recipe_is_written_for(dpofit):
    expected = {f"{e.file.family}/{e.file.name}" for e in all_recipes() if e.card.hardware.gpu == "rtx4090"}
    assert names(dpofit("list", "--gpu", "RTX4090", "--json")) == expected >= {"qwen3-8b-dpo/qlora-1x1"}


def test_fits_keeps_those_predicted_to_fit_the_cluster_of_the_flags(dpofit):
    cluster = ["--gpu", "a100-80g", "--nodes", 1, "--gpus-per-node", 8, "--host-ram", "1000GiB"]
    kept = names(dpofit("list", "--family", "qwen3-32b", "--fits", *cluster, "--json"))
    every = names(dpofit("list", "--family", "qwen3-32b", "--json"))
    for name in every:
        assert (name in kept) == (dpofit("predict", name, *cluster, "--json").json["verdict"] == "fits"), name
    assert kept and every - kept


def test_fits_without_a_cluster_asks_of_the_one_each_is_written_for(dpofit):
    ran = dpofit("list", "--family", "llama3.3-70b-dpo", "--fits", "--json")
    assert names(ran) == names(dpofit("list", "--family", "llama3.3-70b-dpo", "--json"))


def test_no_bf16_recipe_fits_a_card_without_bf16(dpofit):
    assert dpofit("list", "--family", "qwen2.5-7b", "--fits", "--gpu", "v100-32g").exit_code == 1
    assert dpofit("list", "--family", "qwen2.5-7b", "--fits", "--gpu", "v100-99g").exit_code == 2


def test_nothing_left_is_exit_1(dpofit):
    ran = dpofit("list", "--family", "llama3.3-70b-dpo", "--gpu", "t4-16g")
    assert (ran.exit_code, ran.out) == (1, "No recipe is left.\n")


def test_cluster_flags_without_fits_are_refused(dpofit):
    assert dpofit("list", "--nodes", 2).exit_code == 2
