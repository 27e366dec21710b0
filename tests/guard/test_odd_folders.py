"""Whatever lies in a folder, `verify` answers with findings: no traceback, no endless wait, nothing read outside it."""

from __future__ import annotations

import json
import os
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dpofit.findings import Finding
from dpofit.train.guard.check import check_checkpoint
from dpofit.train.guard.manifest import MANIFEST_NAME
from dpofit.train.guard.safetensors_layout import lay_out
from dpofit.train.guard.seal import seal

CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256, "vocab_size": 1024, "dtype": "bfloat16"}
MATRIX = ("BF16", (1024, 256))  # 512 KiB
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


def shard(path: Path, *names: str, fill: bytes = b"") -> None:
    layout = lay_out(dict.fromkeys(names, MATRIX), {"format": "pt"}, {"BF16": 0}.__getitem__)
    body = layout.file_bytes - len(layout.header)
    path.write_bytes(layout.header + (fill or os.urandom(body)))


def raw_header(path: Path, text: str, body: bytes = b"") -> None:
    data = text.encode("utf-8", "surrogatepass")
    path.write_bytes(struct.pack("<Q", len(data)) + data + body)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A stock save of two shards in a path with spaces; no torch is needed to read it."""
    place = tmp_path / "a check point"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(CONFIG))
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(2)]
    for file, name in zip(SHARDS, names, strict=True):
        shard(place / file, name)
    (place / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict(zip(names, SHARDS, strict=True))}))
    return place


def ids(findings: list[Finding], *severities: str) -> set[str]:
    return {finding.id for finding in findings if not severities or finding.severity in severities}


def test_the_folder_itself_is_whole(folder: Path) -> None:
    assert ids(check_checkpoint(folder)) == {"save.no-manifest"}


def test_links_to_blobs_as_in_a_hub_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    for path in list(folder.iterdir()):
        path.rename(tmp_path / "blobs" / path.name)
        path.symlink_to(tmp_path / "blobs" / path.name)
    assert ids(check_checkpoint(folder)) == {"save.no-manifest"}


def dangling_link(folder: Path) -> None:
    (folder / SHARDS[0]).unlink()
    (folder / SHARDS[0]).symlink_to(folder / "gone")


def circular_link(folder: Path) -> None:
    (folder / SHARDS[0]).unlink()
    (folder / SHARDS[0]).symlink_to(SHARDS[0])


def folder_for_a_file(folder: Path) -> None:
    (folder / SHARDS[0]).unlink()
    (folder / SHARDS[0]).mkdir()


def pipe_for_a_file(folder: Path) -> None:
    (folder / SHARDS[0]).unlink()
    os.mkfifo(folder / SHARDS[0])


def pipe_for_a_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def index(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)


def config(folder: Path, **changes: object) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))


def swap_shards(folder: Path) -> None:
    for old, new in ((SHARDS[0], "x"), (SHARDS[1], SHARDS[0]), ("x", SHARDS[1])):
        (folder / old).rename(folder / new)


def header(text: str, body: bytes = b"") -> Callable[[Path], None]:
    return lambda folder: raw_header(folder / SHARDS[0], text, body)


ENTRY = '{"a": {"dtype": "BF16", "shape": %s, "data_offsets": %s}}'
BAD_HEADER = {"save.bad-header"}
DAMAGE: dict[str, tuple[Callable[[Path], None], set[str]]] = {
    "a dangling link": (dangling_link, {"save.bad-header", "save.missing-shard"}),
    "a circular link": (circular_link, {"save.bad-header", "save.missing-shard"}),
    "a folder for a file": (folder_for_a_file, {"save.bad-header", "save.missing-shard"}),
    "a pipe for a file": (pipe_for_a_file, {"save.bad-header", "save.missing-shard"}),
    "a pipe for config.json": (pipe_for_a_config, {"save.bad-config"}),
    "an empty index": (lambda folder: index(folder, ""), {"save.bad-index"}),
    "an index that is a list": (lambda folder: index(folder, "[]"), {"save.bad-index"}),
    "an index of numbers": (lambda folder: index(folder, '{"weight_map": {"a": 1}}'), {"save.bad-index"}),
    "an index that leaves the folder": (
        lambda folder: index(folder, '{"weight_map": {"a": "../../etc/passwd"}}'), {"save.bad-index"},
    ),
    "an index with a root": (lambda folder: index(folder, '{"weight_map": {"a": "/etc/passwd"}}'), {"save.bad-index"}),
    "an index that isn't UTF-8": (lambda folder: (folder / INDEX).write_bytes(b"\xff{}"), {"save.bad-index"}),
    "an index nested without end": (lambda folder: index(folder, "[" * 100_000), {"save.bad-index"}),
    "a config that is a list": (lambda folder: (folder / "config.json").write_text("[1]"), {"save.bad-config"}),
    "a config with a billion layers": (lambda folder: config(folder, num_hidden_layers=10**9), {"save.not-this-model"}),
    "a weights file of no bytes": (lambda folder: (folder / SHARDS[0]).write_bytes(b""), BAD_HEADER),
    "a header longer than the file": (
        lambda folder: (folder / SHARDS[0]).write_bytes(struct.pack("<Q", 1 << 62) + b"{}"), BAD_HEADER,
    ),
    "a header that is a list": (header("[]"), BAD_HEADER),
    "overlapping tensors": (
        header('{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},'
               ' "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]}}', bytes(6)), BAD_HEADER,
    ),
    "a tensor that ends before it starts": (header(ENTRY % ("[2]", "[4, 0]"), bytes(4)), BAD_HEADER),
    "a negative shape": (header(ENTRY % ("[-1, -2]", "[0, 4]"), bytes(4)), BAD_HEADER),
    "fractions of bytes": (header(ENTRY % ("[2]", "[0.0, 4.0]"), bytes(4)), BAD_HEADER),
    "offsets in words": (header(ENTRY % ("[2]", '["0", "4"]'), bytes(4)), BAD_HEADER),
    "a shape beyond any memory": (header(ENTRY % ("[9999999999, 9999999999]", "[0, 4]"), bytes(4)), BAD_HEADER),
    "a dtype that is a list": (
        header('{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}', bytes(4)), BAD_HEADER,
    ),
    "a header nested without end": (header("[" * 100_000), BAD_HEADER),
    "two saves in one folder": (
        lambda folder: shard(folder / "model.safetensors", "model.layers.0.mlp.up_proj.weight"),
        {"save.duplicate-tensor"},
    ),
    "tensors swapped between shards": (
        swap_shards, {"save.missing-tensor"},
    ),
    "an optimizer file cut short": (
        lambda folder: (folder / "optimizer.pt").write_bytes(b"PK\x03\x04" + bytes(5000)), {"save.torch-file"},
    ),
    "an optimizer file of zeros": (
        lambda folder: (folder / "optimizer.pt").write_bytes(bytes(99)), {"save.torch-file"},
    ),
    "an empty model-state file": (lambda folder: (folder / "rng_state.pth").touch(), {"save.torch-file"}),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_gets_its_name(folder: Path, name: str) -> None:
    damage, expected = DAMAGE[name]
    damage(folder)
    assert ids(check_checkpoint(folder), "error") >= expected


MANIFESTS: dict[str, Callable[[dict], None]] = {
    "a file outside": lambda document: document["files"][0].update(path="../other"),
    "a file with a root": lambda document: document["files"][0].update(path="/etc/passwd"),
    "bytes that nothing covers": lambda document: document["files"][0].update(extents=[]),
    "an extent beyond the end": lambda document: document["files"][0]["extents"][0].update(length=10**9),
    "sizes in words": lambda document: document["files"][0].update(bytes="many"),
    "no files": lambda document: document.pop("files"),
    "another schema": lambda document: document.update(schema="dpofit.manifest/9"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_promises_nothing_isnt_believed(folder: Path, name: str) -> None:
    seal(folder, 1, 1, "direct")
    assert check_checkpoint(folder) == []
    document = json.loads((folder / MANIFEST_NAME).read_text())
    MANIFESTS[name](document)
    (folder / MANIFEST_NAME).write_text(json.dumps(document))
    assert "save.manifest-unreadable" in ids(check_checkpoint(folder), "error")


def test_a_hole_is_found_across_the_edges_of_what_is_read_at_once(folder: Path) -> None:
    for position in (0, 100_001, (1 << 20) - (1 << 15) - 1, (1 << 20) - 1):
        with (folder / SHARDS[0]).open("r+b") as file:
            name = "model.layers.0.mlp.up_proj.weight"
            shape = ("BF16", (4096, 256))  # 2 MiB
            layout = lay_out({name: shape}, {"format": "pt"}, {"BF16": 0}.__getitem__)
            file.write(layout.header + b"\1" * (2 << 20))
            file.seek(len(layout.header) + position)
            file.write(bytes(1 << 16))
        found = [finding for finding in check_checkpoint(folder) if finding.id == "save.zero-hole"]
        assert len(found) == 1, position


@pytest.mark.parametrize(
    ("tensor", "severity"),
    [("model.layers.0.mlp.up_proj.weight", "error"), ("model.embed_tokens.weight", "warning"),
     ("base_model.model.layers.0.q_proj.lora_B.weight", "warning")],
)  # fmt: skip
def test_zeros_that_may_be_meant_are_a_warning(tmp_path: Path, tensor: str, severity: str) -> None:
    shard(tmp_path / "model.safetensors", tensor, fill=bytes(1024 * 256 * 2))
    assert [finding.severity for finding in check_checkpoint(tmp_path) if finding.id == "save.zero-hole"] == [severity]


def test_names_cannot_write_to_the_terminal(folder: Path) -> None:
    raw_header(folder / SHARDS[0], '{"\\u001b[2J\\ud800": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}')
    for finding in check_checkpoint(folder):
        for evidence in finding.evidence:
            assert (evidence.where + evidence.text).isprintable()


def test_ten_thousand_lost_shards_are_one_finding_in_seconds(tmp_path: Path) -> None:
    names = {f"model.layers.{i}.w": f"model-{i:05d}-of-10000.safetensors" for i in range(10_000)}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    shard(tmp_path / "model-00000-of-10000.safetensors", "model.layers.0.w")
    started = time.process_time()
    findings = [finding for finding in check_checkpoint(tmp_path) if finding.severity == "error"]
    assert time.process_time() - started < 5
    assert [finding.title for finding in findings] == ["9999 weights files are missing"]
    assert len(findings[0].evidence) == 5


def test_an_unreadable_file_is_a_finding() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to other users
        place = Path(name)
        place.chmod(0o755)
        shard(place / SHARDS[0], "model.layers.0.mlp.up_proj.weight")
        (place / SHARDS[0]).chmod(0)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)  # root reads everything
        try:
            findings = check_checkpoint(place)
        finally:
            os.seteuid(user)
    assert "save.bad-header" in ids(findings, "error")
    assert "Permission denied" in findings[0].evidence[0].text
