"""Files that are no proper safetensors: exit code 2, one line that names the file or the tensor, no output file."""

import json
import struct

import numpy as np
import pytest
from problems import make_iid
from tensor_file import data_of, file_bytes, header_of


def good_parts():
    """(header, data) of an accepted file."""
    tensors = make_iid(num_tokens=2, num_keys=8, topk=4, num_heads=1, gradient=False).tensors
    return header_of(tensors), data_of(tensors)


def entry_change(name, **changes):
    header, data = good_parts()
    header[name] = header[name] | changes
    return file_bytes(header, data)


def text_change(old, new):
    header, data = good_parts()
    text = json.dumps(header)
    assert old in text
    return file_bytes(text.replace(old, new).encode(), data)


def overlapping():
    header, data = good_parts()
    begin, end = header["k_rope"]["data_offsets"]
    header["k_rope"]["data_offsets"] = [begin - 16, end - 16]
    return file_bytes(header, data)


def same_range_twice():
    header, data = good_parts()
    header["dlse"] = header["indices"] | {"dtype": "F32"}
    return file_bytes(header, data)


def with_gap():
    header, data = good_parts()
    begin, end = header["indices"]["data_offsets"]  # the last one
    header["indices"]["data_offsets"] = [begin + 8, end + 8]
    return file_bytes(header, data + bytes(8))


def extra_entry(**entry):
    header, data = good_parts()
    return file_bytes(header | {"sink": entry}, data)


def duplicate_name():
    header, data = good_parts()
    text = json.dumps(header)
    return file_bytes((text[:-1] + ', "indices": ' + json.dumps(header["indices"]) + "}").encode(), data)


def with_length(length):
    content = file_bytes(*good_parts())
    return struct.pack("<Q", length) + content[8:]


MALFORMED = {
    "empty": lambda: b"",
    "seven bytes": lambda: bytes(7),
    "length alone": lambda: struct.pack("<Q", 2),
    "header of no bytes": lambda: struct.pack("<Q", 0),
    "truncated header": lambda: file_bytes(*good_parts())[:40],
    "truncated data": lambda: file_bytes(*good_parts())[:-1],
    "no data": lambda: file_bytes(good_parts()[0], b""),
    "oversized by a byte": lambda: file_bytes(*good_parts()) + b"x",
    "oversized by a page": lambda: file_bytes(*good_parts()) + bytes(4096),
    "header length 2^63": lambda: with_length(2**63),
    "header length 2^64-1": lambda: with_length(2**64 - 1),
    "header longer than the file": lambda: with_length(10**6),
    "header length too short": lambda: with_length(20),
    "not JSON": lambda: file_bytes(b"this is no JSON", b""),
    "binary noise": lambda: np.random.default_rng(1).bytes(5000),
    "JSON array": lambda: file_bytes(b"[1, 2, 3]", b""),
    "JSON string": lambda: file_bytes(b'"q_latent"', b""),
    "trailing text after the object": lambda: file_bytes(json.dumps(good_parts()[0]).encode() + b"{}", good_parts()[1]),
    "bytes that are not UTF-8": lambda: file_bytes(b'{"q\xff\xfe": 1}', b""),
    "deep nesting": lambda: file_bytes(b"[" * 100000, b""),
    "overlapping ranges": overlapping,
    "one range for two tensors": same_range_twice,
    "gap": with_gap,
    "gap at the front": lambda: entry_change("q_latent", data_offsets=[8, 8 + 2 * 512 * 2]),
    "duplicate name": duplicate_name,
    "range past the end": lambda: entry_change("indices", shape=[4, 4], data_offsets=[
        good_parts()[0]["indices"]["data_offsets"][0], good_parts()[0]["indices"]["data_offsets"][0] + 64]),
    "range backwards": lambda: entry_change("indices", data_offsets=[
        *reversed(good_parts()[0]["indices"]["data_offsets"])]),
    "shape larger than the range": lambda: entry_change("q_latent", shape=[4, 1, 512]),
    "shape smaller than the range": lambda: entry_change("q_latent", shape=[1, 1, 512]),
    "negative extent": lambda: entry_change("q_latent", shape=[-2, -1, 512]),
    "fractional extent": lambda: text_change("[2, 1, 512]", "[2.0, 1, 512]"),
    "extent as text": lambda: entry_change("q_latent", shape=["2", 1, 512]),
    "extent that overflows": lambda: extra_entry(dtype="F32", shape=[2**62, 2**62], data_offsets=[0, 0]),
    "extents whose product wraps to 0": lambda: extra_entry(dtype="F32", shape=[2**32, 2**32], data_offsets=[0, 0]),
    "extent above 2^64": lambda: text_change("[2, 1, 512]", "[2, 1, 512" + "0" * 30 + "]"),
    "unknown dtype": lambda: entry_change("q_latent", dtype="BF17"),
    "dtype in lower case": lambda: entry_change("q_latent", dtype="bf16"),
    "dtype as number": lambda: entry_change("q_latent", dtype=16),
    "entry without shape": lambda: extra_entry(dtype="F32", data_offsets=[0, 0]),
    "entry without offsets": lambda: extra_entry(dtype="F32", shape=[0]),
    "entry that is null": lambda: file_bytes(good_parts()[0] | {"sink": None}, good_parts()[1]),
    "three offsets": lambda: entry_change("q_latent", data_offsets=[0, 1024, 2048]),
    "metadata that is no object": lambda: file_bytes(good_parts()[0] | {"__metadata__": "x"}, good_parts()[1]),
    "metadata that is no text": lambda: file_bytes(good_parts()[0] | {"__metadata__": {"a": 1}}, good_parts()[1]),
    "rank 40": lambda: extra_entry(dtype="F32", shape=[0] * 40, data_offsets=[0, 0]),
}


def test_the_good_file_is_accepted(program):
    source = program.new_path()
    source.write_bytes(file_bytes(*good_parts()))
    program.succeed("run", source, "-o", program.new_path())


def test_a_padded_header_is_accepted(program):
    """The format lets writers end the header with spaces."""
    header, data = good_parts()
    source = program.new_path()
    source.write_bytes(file_bytes(json.dumps(header).encode() + b"   ", data))
    program.succeed("run", source, "-o", program.new_path())


@pytest.mark.parametrize("command", ["run", "audit"])
@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_file(program, kind, command):
    source = program.new_path()
    source.write_bytes(MALFORMED[kind]())
    arguments = ["-o", program.new_path()] if command == "run" else ["--json", program.new_path(".json")]
    program.reject("", command, source, *arguments)


@pytest.mark.parametrize("kind", ["truncated data", "not JSON", "overlapping ranges", "oversized by a byte"])
def test_the_message_names_the_file(program, kind):
    source = program.new_path()
    source.write_bytes(MALFORMED[kind]())
    program.reject(source.name, "run", source, "-o", program.new_path())


def test_a_name_with_line_breaks_keeps_the_message_on_one_line(program):
    header, data = good_parts()
    source = program.new_path()
    source.write_bytes(file_bytes(header | {"a\nb\rc\x1b[31m": {"dtype": "F32", "shape": [0],
                                                                 "data_offsets": [len(data), len(data)]}}, data))
    line = program.reject("", "run", source, "-o", program.new_path())
    assert "\x1b" not in line
