"""What a file is, told by its content: names and endings are wrong on purpose."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import struct
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.formats.sniff import Sniffed, sniff
from ckpttool.io.reading import FileReader
from tests import corrupt

Look = Callable[[bytes], Sniffed]
CORPUS = Path(__file__).parents[3] / "fixtures" / "corpus"
ZIP = (CORPUS / "torch-2.13.0" / "train_zip.pt").read_bytes()
BARE = (CORPUS / "torch-2.13.0" / "tensor_bare.pt").read_bytes()
LEGACY = (CORPUS / "torch-2.13.0" / "train_legacy.pt").read_bytes()
SAFETENSORS = (CORPUS / "seed-runs/hub/global/latest.safetensors").read_bytes()
LFS = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    b"size 12345\n"
)
HTML = b"<!DOCTYPE html>\n<html><head><title>404\x1b[31m Not\n Found</title></head></html>"
S3 = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n'
    b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
)


@pytest.fixture
def look(tmp_path: Path) -> Look:
    def sniff_bytes(data: bytes) -> Sniffed:
        path = tmp_path / "step_000000000004.pt"
        path.write_bytes(data)
        with FileReader(path) as reader:
            return sniff(reader)

    return sniff_bytes


CORPUS_KINDS = {
    "torch-1.6.0/quant.pt": "torch-zip",
    "torch-1.6.0/scripted_ts.pt": "torchscript",
    "torch-1.6.0/train_legacy.pt": "torch-legacy",
    "torch-2.13.0/traced_ts.pt": "torchscript",
    "torch-2.13.0/export.pt2": "pt2",
    "torch-2.13.0/lightning.ckpt": "torch-zip",
    "torch-2.13.0/rezipped_deflated.pt": "torch-zip",
    "torch-2.13.0/none_bare.pt": "torch-zip",
    "torch-2.13.0/truncated_zip.pt": "torch-zip",
    "torch-2.13.0/truncated_legacy.pt": "torch-legacy",
    "torch-2.13.0/plain_pickle.pkl": "pickle",
    "torch-2.13.0/dcp_single/.metadata": "dcp-metadata",
    "torch-2.13.0/dcp_single/__0_0.distcp": "dcp-shard",
    "torch-2.13.0/hf_trainer/checkpoint-10/model.safetensors": "safetensors",
    "torch-2.13.0/hf_trainer/checkpoint-10/config.json": "json",
    "torch-2.13.0/hf_trainer/checkpoint-10/training_args.bin": "torch-zip",
    "torch-2.13.0/deepspeed_like_zero2/latest": "text",
}


@pytest.mark.parametrize(("name", "kind"), CORPUS_KINDS.items())
def test_files_of_the_corpus(name: str, kind: str) -> None:
    with FileReader(CORPUS / name) as reader:
        found = sniff(reader)
    assert found.kind == kind
    assert (found.container is not None) == (
        kind in {"torch-zip", "torchscript", "pt2", "dcp-shard"}
    )


def tar(names: list[str]) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 3
            archive.addfile(info, io.BytesIO(b"abc"))
    return target.getvalue()


def npz() -> bytes:
    import numpy

    target = io.BytesIO()
    numpy.savez(target, a=numpy.arange(3), b=numpy.arange(2))
    return target.getvalue()


SAMPLES: dict[str, tuple[bytes, str]] = {
    "lfs": (LFS, "git-lfs-pointer"),
    "html": (HTML, "html"),
    "html with a byte order mark": (b"\xef\xbb\xbf" + HTML, "html"),
    "html in UTF-16": ("\ufeff<html><title>x</title>".encode("utf-16-le"), "html"),
    "html without a doctype": (b"  \n<HTML lang=en><body>sign in</body>", "html"),
    "S3 error": (S3, "xml"),
    "json error": (b'{"error": "Repository not found"}', "json"),
    "text": (b"Entry not found", "text"),
    "gzip": (gzip.compress(ZIP), "gzip"),
    "bzip2": (bz2.compress(ZIP), "bzip2"),
    "xz": (lzma.compress(ZIP), "xz"),
    "7z": (b"7z\xbc\xaf\x27\x1c" + b"\x9c\x11" * 500, "7z"),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(range(200)), "zstd"),
    "numpy": (b"\x93NUMPY\x01\x00" + bytes(100), "numpy"),
    "npz": (npz(), "npz"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(100), "hdf5"),
    "gguf": (b"GGUF\x03\0\0\0" + bytes(20), "gguf"),
    "empty": (b"", "empty"),
    "one zero": (b"\0", "zeros"),
    "zeros": (bytes(4096), "zeros"),
    "many zeros": (bytes(1_000_000), "zeros"),
    "zeros, then something": (bytes(999_999) + b"x", "unknown"),
    "noise": (bytes((i * i * 89 + i) % 251 + 1 for i in range(5000)), "unknown"),
    "safetensors": (SAFETENSORS, "safetensors"),
    "tar": (tar(["a", "b"]), "tar"),
    "legacy tar": (tar(["sys_info", "pickle", "tensors", "storages"]), "torch-legacy-tar"),
    "zip of other things": (corrupt.torch_zip([("docs/readme.txt", b"hello")]), "zip"),
    "torch zip with junk in front": (b"7 bytes" + ZIP, "torch-zip"),
    "torch zip with its first byte damaged": (corrupt.flip_bit(ZIP, 0), "torch-zip"),
    "first block of a torch zip": (ZIP[:4096], "torch-zip"),
    "first bytes of a torch zip": (ZIP[:20], "zip"),
    "two torch zips": (ZIP + ZIP, "torch-zip"),
    "two bare tensors": (BARE + BARE, "torch-zip"),
    "a torch zip of which the end is zero": (corrupt.zero_tail(ZIP, 30_000), "torch-zip"),
    "PDF": (b"%PDF-1.7 ...", "unknown"),
    **{
        f"pickle of protocol {protocol}": (pickle.dumps({"a": [1, 2, 3]}, protocol), "pickle")
        for protocol in range(6)
    },
    "legacy of protocol 2": (LEGACY, "torch-legacy"),
    "first bytes of a legacy file": (LEGACY[:60], "torch-legacy"),
    **{
        f"legacy of protocol {protocol}": (pickle.dumps(0x1950A86A20F9469CFC6C, protocol), kind)
        for protocol, kind in ((0, "torch-legacy"), (1, "torch-legacy"), (4, "torch-legacy"))
    },
}


@pytest.mark.parametrize("sample", SAMPLES)
def test_kinds(look: Look, sample: str) -> None:
    data, kind = SAMPLES[sample]
    assert look(data).kind == kind


def test_lfs_pointer_tells_what_it_stands_for(look: Look) -> None:
    assert look(LFS).facts == {
        "oid": "4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393",
        "size": 12345,
    }


def test_title_of_a_page_is_cleaned(look: Look) -> None:
    assert look(HTML).facts["title"] == "404 [31m Not Found"
    long = look(b"<html><title>" + b"x" * 1900 + b"</title>")
    assert len(long.facts["title"]) <= 120


def test_message_of_an_xml_error(look: Look) -> None:
    assert look(S3).facts["title"] == "AccessDenied: Access Denied"


@pytest.mark.parametrize(
    ("inner", "kind"),
    [(ZIP, "zip"), (LEGACY, "torch-legacy"), (tar(["a"]), "tar"), (pickle.dumps([1], 4), "pickle")],
)
@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_what_is_inside_compressed_data(look: Look, compress, inner: bytes, kind: str) -> None:
    assert look(compress(inner)).facts["inner"] == kind


def test_damaged_compressed_data_is_still_told(look: Look) -> None:
    assert look(b"\x1f\x8b" + b"\xff" * 50) == Sniffed("gzip", "gzip-compressed data", {})


def test_compressed_bomb_is_not_inflated(look: Look) -> None:
    bomb = gzip.compress(bytes(100 << 20))
    tracemalloc.start()
    try:
        assert look(bomb).kind == "gzip"
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (SAFETENSORS, None),
        (corrupt.cut_end(SAFETENSORS, 10), "it is cut: 16,790 bytes instead of 16,800"),
        (SAFETENSORS + b"x", "it has bytes behind its end: 16,801 bytes instead of 16,800"),
        (SAFETENSORS[:200], "it ends within its header"),
        (struct.pack("<Q", 1 << 40) + SAFETENSORS[8:], "its header length is out of bounds"),
        (SAFETENSORS[:100] + b"\xff" + SAFETENSORS[101:], "its header is malformed"),
    ],
)
def test_damaged_safetensors(look: Look, data: bytes, problem: str | None) -> None:
    found = look(data)
    assert found.kind == "safetensors"
    assert found.facts.get("problem") == problem


def test_deeply_nested_json_is_no_crash(look: Look) -> None:
    assert look(b"[" * 200_000).kind in {"json", "text"}


def test_json_needs_to_be_json(look: Look) -> None:
    assert look(json.dumps([1, {"a": None}]).encode()).words == "JSON (list)"
    assert look(b"{not json").kind == "text"


@given(
    st.one_of(
        st.binary(max_size=300),
        st.sampled_from([data[:3000] for data, _ in SAMPLES.values()]).flatmap(
            lambda data: st.integers(0, len(data)).map(lambda n: data[:n] + b"\xff" + data[n + 1 :])
        ),
    )
)
@settings(max_examples=300)
def test_any_bytes_have_a_kind(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "sniffed"
    path.write_bytes(data)
    with FileReader(path) as reader:
        found = sniff(reader)
    assert found.kind and found.words.isprintable()
