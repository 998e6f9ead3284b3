"""Bad options: exit code 2, one line that names the option, no output file."""

import pytest
from problems import make_iid


@pytest.fixture
def source(program):
    return make_iid(num_tokens=2, num_keys=8, topk=4).save(program.new_path())


@pytest.mark.parametrize("value", ["128", "127.995", "1e9", "-1", "-0.001", "nan", "inf", "-inf", "eight", ""])
def test_unsafe_threshold(program, source, value):
    program.reject("threshold", "run", source, "-o", program.new_path(), f"--rescale-threshold={value}")


@pytest.mark.parametrize("option, value", [
    ("--key-block", "0"), ("--key-block", "-64"), ("--key-block", "64.5"), ("--key-block", "99999999999999"),
    ("--walk", "sideways"), ("--row-sum", "both"), ("--residual", "maybe"), ("--operands", "fp8"),
    ("--grad-dtype", "fp16"), ("--threads", "-1"), ("--threads", "two"), ("--device", "tpu"), ("--device", "cuda:"), ("--device", "cuda:-1"), ("--device", "cuda:1x"), ("--device", "cuda0"),
    ("--softmax-scale", "nan"), ("--softmax-scale", "inf"), ("--softmax-scale", "fast")])
def test_bad_value(program, source, option, value):
    program.reject(option.lstrip("-").replace("-", "_").split("_")[-1], "run", source, "-o", program.new_path(),
                   f"{option}={value}")


def test_unknown_option(program, source):
    program.reject("--fast", "run", source, "-o", program.new_path(), "--fast")


def test_missing_output(program, source):
    program.reject("output", "run", source)


def test_missing_input(program):
    program.reject("IN", "run", "-o", program.new_path())


def test_input_that_does_not_exist(program):
    program.reject("nowhere.safetensors", "run", "nowhere.safetensors", "-o", program.new_path())


def test_input_that_is_a_folder(program):
    program.reject(program.folder.name, "run", program.folder, "-o", program.new_path())


@pytest.mark.parametrize("target", ["no_such_folder/out.safetensors", "."])
def test_output_that_cannot_be_written(program, source, target):
    program.reject("output", "run", source, "-o", target)


def test_a_rejected_call_leaves_an_existing_output_alone(program, source):
    target = program.new_path()
    target.write_bytes(b"kept")
    program.reject("threshold", "run", source, "-o", target, "--rescale-threshold=128")
    assert target.read_bytes() == b"kept"


def test_a_device_that_is_not_there_is_never_replaced_in_silence(program, source):
    target = program.new_path()
    result = program.call("run", source, "-o", target, "--device", "cuda")
    if result.returncode == 0:
        assert "cpu" not in result.stdout
    else:
        assert result.returncode == 2 and len(result.stderr.splitlines()) == 1 and not target.exists()
        assert "cuda" in result.stderr or "device" in result.stderr


@pytest.mark.parametrize("arguments, named", [((), "subcommand"), (("walk",), "walk")])
def test_bad_subcommand(program, arguments, named):
    program.reject(named, *arguments)


def test_options_of_audit(program):
    for named, options in {"pipeline": ["--pipelines", "sloppy"], "order": ["--orders", "sideways"],
                           "preset": ["--preset", "huge"], "topk": ["--topk", "-1"]}.items():
        source = [] if named == "preset" else ["--peaked"]
        program.reject(named, "audit", *source, *options)
    program.reject("nowhere", "audit", "nowhere.safetensors")
