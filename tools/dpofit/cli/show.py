"""`dpofit show`: one recipe, with all that its YAML can't say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dpofit.recipe.catalogue import CatalogueFile, catalogue_file, recipe_files
from dpofit.recipe.load import resolve_reference


def command(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A name from `dpofit list`, or your own file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print dpofit.show/1.")] = False,
) -> None:
    """One recipe: why its preset is as it is, environment, documented limit, versions, history, and the YAML itself.

    Of your own file: how it was understood, the environment and long-context pieces beside it, and the text.

    \b
    Examples:
      dpofit show qwen2.5-72b-dpo/full-z3
      dpofit show lora-z3.v1
      dpofit show runs/first
      dpofit show full-z3-offload-liger-unsloth-gc --json | jq .environment
    """
    path = resolve_reference(recipe)
    file = catalogue_file(path)
    document = describe(file) if file is not None else describe_own(path)
    if as_json:
        print(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        print(_as_text(document), end="")


def describe(file: CatalogueFile) -> dict[str, Any]:
    """The `dpofit.show/1` document."""
    from dpofit.recipe.cards import card_of, environment_of, pieces_of, read_presets
    from dpofit.recipe.long_context import PIECES

    presets = read_presets()
    card = card_of(file.path)
    assert card is not None
    versions = [
        {"version": other.version, "change": card.versions[other.version], "path": str(other.path)}
        for other in recipe_files()
        if (other.family, other.name) == (file.family, file.name)
    ]
    return {
        "schema": "dpofit.show/1",
        "recipe": f"{file.family}/{file.name}",
        "version": file.version,
        "title": card.title or presets.presets[card.preset].title,
        "preset": card.preset,
        "knobs": [{"knob": name, "why": knob.why} for name, knob in presets.knobs_of(card.preset).items()],
        "hardware": card.hardware.model_dump(),
        "environment": [
            {"variable": name, "value": variable.value, "why": variable.why}
            for name, variable in environment_of(card, presets).items()
        ],
        "long_context": [piece for piece in PIECES if piece in pieces_of(card, presets)],
        "documented": card.documented.model_dump() if card.documented else None,
        "versions": versions,
        "history": card.history or None,
        "notes": card.notes or None,
        "path": str(file.path),
        "yaml": file.path.read_text(encoding="utf-8"),
    }


def describe_own(path: Path) -> dict[str, Any]:
    """The `dpofit.show/1` document of a file from elsewhere: what only a card can say is null or empty."""
    from dpofit.recipe.load import load_recipe
    from dpofit.recipe.long_context import PIECES

    loaded = load_recipe(str(path))
    return {
        "schema": "dpofit.show/1",
        "recipe": loaded.recipe.name,
        "version": None,
        "title": f"{loaded.recipe.stage} of {loaded.recipe.model}, {loaded.recipe.finetuning}",
        "preset": None,
        "knobs": [],
        "hardware": None,
        "environment": [
            {"variable": name, "value": value, "why": "dpofit.yaml or this environment"}
            for name, value in loaded.recipe.environment.items()
        ],
        "long_context": [piece for piece in PIECES if piece in loaded.recipe.long_context],
        "documented": None,
        "versions": [],
        "history": None,
        "notes": " ".join(note.text for note in loaded.notes) or None,
        "path": str(path),
        "yaml": path.read_text(encoding="utf-8"),
    }


def _as_text(document: dict[str, Any]) -> str:
    hardware = document["hardware"]
    documented = document["documented"]
    version = "" if document["version"] is None else f".v{document['version']}"
    head = [f"{document['recipe']}{version}: {document['title']}", document["path"]]
    lines: list[str] = []
    if hardware:
        nodes = f"{hardware['nodes']} x {hardware['gpus_per_node']} {hardware['gpu']}"
        lines += _paragraph("written for", f"{nodes}, {hardware['host_ram']} of RAM a node")
    if documented:
        lines += _paragraph("documented", f"{documented['prompt_tokens']:,} prompt tokens ({documented['source']})")
    if document["long_context"]:
        lines += _paragraph("long context", ", ".join(document["long_context"]) + " (docs/long-context.md)")
    for knob in document["knobs"]:
        lines += _paragraph(knob["knob"], knob["why"])
    for variable in document["environment"]:
        lines += _paragraph("env", f"{variable['variable']}={variable['value']}: {variable['why']}")
    for key in ("notes", "history"):
        if document[key]:
            lines += _paragraph(key, document[key])
    for version in document["versions"]:
        lines += _paragraph(f"v{version['version']}", version["change"])
    return "\n\n".join("\n".join(stanza) for stanza in (head, lines, [document["yaml"]]) if stanza)


def _paragraph(label: str, text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, 100, initial_indent=f"{label:<24}", subsequent_indent=" " * 24, break_on_hyphens=False)
