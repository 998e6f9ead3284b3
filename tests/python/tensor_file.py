"""Safetensors files for the tests: any dtype, bf16 as uint16 bit patterns, and malformed files on purpose.

Written for the tests alone, so that the program's reader and writer are held against something else than themselves.
"""

import json
import struct

import numpy as np

# A uint16 array stands for bf16.
DTYPE_OF = {"uint16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "int32": "I32", "int64": "I64",
            "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"}
NUMPY_OF = {dtype: name for name, dtype in DTYPE_OF.items()}


def to_bf16(values):
    """uint16 bit patterns of values rounded to nearest, ties to even. Infinity stays; NaN becomes a quiet NaN."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(np.asarray(values, np.float32)), np.uint16(0x7FC0), rounded)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def numbers(array):
    """fp64 values of an array as it stands in a file."""
    return from_bf16(array).astype(np.float64) if array.dtype == np.uint16 else array.astype(np.float64)


def header_of(tensors, metadata=None):
    """The header as a dictionary, data packed in the given order."""
    header, offset = ({"__metadata__": metadata} if metadata else {}), 0
    for name, array in tensors.items():
        header[name] = {"dtype": DTYPE_OF[array.dtype.name], "shape": list(array.shape),
                        "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    return header


def data_of(tensors):
    return b"".join(np.ascontiguousarray(array).tobytes() for array in tensors.values())


def file_bytes(header, data):
    """`header`: a dictionary, or bytes to stand there as they are."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def save(path, tensors, metadata=None):
    path.write_bytes(file_bytes(header_of(tensors, metadata), data_of(tensors)))


def load(path):
    """(name -> array as stored, metadata). Checks that the ranges tile the data exactly."""
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:8 + length])
    metadata = header.pop("__metadata__", {})
    data = content[8 + length:]
    tensors, covered = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        assert begin == covered, f"{name} begins at {begin}, the one before it ends at {covered}"
        covered = end
        array = np.frombuffer(data[begin:end], dtype=NUMPY_OF[entry["dtype"]])
        tensors[name] = array.reshape(entry["shape"])
    assert covered == len(data), f"{len(data)} bytes of data, {covered} described"
    return tensors, metadata
