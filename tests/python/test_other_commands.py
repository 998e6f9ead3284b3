"""`sparsemla info`, `plan`, `bench`, and what concerns every command."""

import json

import pytest
from problems import make_iid


def test_version(program):
    assert program.succeed("--version").stdout.strip()


@pytest.mark.parametrize("command", ["info", "run", "audit", "plan", "bench"])
def test_help_names_every_command(program, command):
    assert command in program.succeed("--help").stdout
    assert program.succeed(command, "--help").stdout.strip()


@pytest.mark.parametrize("command, options", [
    ("run", "--output --training --backward --causal --softmax-scale --rescale-threshold --key-block --walk --row-sum "
            "--residual --operands --grad-dtype --canonical --deterministic --threads --device --reference"),
    ("audit", "--peaked --tokens --keys --topk --heads --beta --seed --pipelines --orders --gradients --candidate "
              "--json --check --threads --device --preset")])
def test_help_names_every_option(program, command, options):
    words = program.succeed(command, "--help").stdout.replace(",", " ").split()
    assert [option for option in options.split() if option not in words] == []


def test_info_lists_backends(program):
    assert "cpu" in program.succeed("info").stdout


def test_plan_prints_what_shapes_the_result(program):
    source = make_iid().save(program.new_path())
    text = program.succeed("plan", source).stdout
    assert "cpu" in text and "key" in text
    backward = program.succeed("plan", source, "--backward").stdout
    assert backward != text


def test_plan_rejects_what_run_rejects(program):
    bad = make_iid()
    bad.tensors["indices"] = bad.tensors["indices"][:2]
    program.reject("indices", "plan", bad.save(program.new_path()))


def test_bench_times_each_number_of_keys(program):
    small = ["bench", "--tokens", "2", "--topk", "8", "--heads", "3", "--repeats", "1", "--json"]
    results = json.loads(program.succeed(*small, "--keys", "20,40").stdout)
    assert [result["keys"] for result in results] == [20, 40]
    assert json.loads(program.succeed(*small, "--keys", "20").stdout)["keys"] == 20


@pytest.mark.parametrize("options, named", [
    (["--pipelines", "lazy"], "--pipelines"), (["--seconds", "1"], "--seconds"), (["--keys", "20,x"], "--keys"),
    (["--device", "cuda:x"], "--device"), (["--heads", "257"], "heads"), (["--keys", "0"], "S 0")])
def test_bench_rejects(program, options, named):
    program.reject(named, "bench", "--tokens", "2", "--topk", "8", *options)


@pytest.mark.parametrize("arguments", [["bench", "--tokens", "2", "--seconds", "0.01"], ["audit", "--preset", "small"], ["plan"]])
def test_a_device_runs_or_is_refused(program, arguments):
    result = program.call(*arguments, "--device", "cuda:4096")
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
    assert "--device" in result.stderr and "cuda:4096" in result.stderr


def test_run_prints_nothing_on_stderr_without_a_terminal(program):
    source = make_iid().save(program.new_path())
    assert program.succeed("run", source, "-o", program.new_path()).stderr == ""
