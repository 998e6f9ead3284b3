"""scripts/plot_audit.py: it draws what the audit wrote, and says in one line what it cannot use."""

import json
import subprocess
import sys

import pytest

SMALL = ["--peaked", "--tokens", "128", "--keys", "128", "--topk", "96", "--heads", "4", "--pipelines", "lazy,exact"]


@pytest.fixture(scope="module")
def audits(binary, tmp_path_factory):
    """Two audits with gradients, at two betas."""
    folder = tmp_path_factory.mktemp("plot")
    paths = [folder / f"beta{beta}.json" for beta in ("0.25", "0.4")]
    for path in paths:
        beta = path.stem.removeprefix("beta")
        subprocess.run([binary, "audit", *SMALL, "--beta", beta, "--gradients", "--json", path], check=True,
                       capture_output=True, timeout=300)
    return paths


@pytest.fixture
def plot(repository, tmp_path):
    def call(*arguments):
        return subprocess.run([sys.executable, "-B", repository / "scripts" / "plot_audit.py", *map(str, arguments)],
                              capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)

    return call


def rejected(result, named):
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1 and named in result.stderr, result.stderr


def test_rows(plot, audits, tmp_path):
    pytest.importorskip("matplotlib")
    result = plot(audits[0], "-o", tmp_path / "rows.svg")
    assert result.returncode == 0, result.stderr
    assert plot(audits[0], "-o", tmp_path / "again.svg").returncode == 0
    content = (tmp_path / "rows.svg").read_text()
    assert content == (tmp_path / "again.svg").read_text(), "the same input must give the same file"
    plot(audits[0], "-o", tmp_path / "one.svg", "--pipelines", "exact")
    assert (tmp_path / "one.svg").read_text() != content


def test_gradients(plot, audits, tmp_path):
    pytest.importorskip("matplotlib")
    result = plot(*audits, "-o", tmp_path / "gradients.png")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "gradients.png").read_bytes().startswith(b"\x89PNG")


def test_without_histogram(plot, audits, tmp_path):
    pytest.importorskip("matplotlib")
    audit = json.loads(audits[0].read_text())
    for entry in audit["forward"]:
        entry.pop("row_gain_histogram", None)
    (tmp_path / "plain.json").write_text(json.dumps(audit))
    assert plot("plain.json", "-o", tmp_path / "plain.png").returncode == 0


def test_help(plot):
    result = plot("--help")
    assert result.returncode == 0 and "peaked" in result.stdout


def test_rejections(plot, audits, tmp_path):
    (tmp_path / "noise.json").write_text("not json")
    (tmp_path / "other.json").write_text("{}")
    no_gradients = json.loads(audits[0].read_text()) | {"gradients": []}
    (tmp_path / "no_gradients.json").write_text(json.dumps(no_gradients))
    rejected(plot("nowhere.json", "-o", "a.png"), "nowhere.json")
    rejected(plot("noise.json", "-o", "a.png"), "noise.json")
    rejected(plot("other.json", "-o", "a.png"), "setup")
    rejected(plot("no_gradients.json", "-o", "a.png", "--kind", "gradients"), "gradients")
    rejected(plot(audits[0], "-o", "a.bmp"), "a.bmp")
    rejected(plot(audits[0]), "--output")
    rejected(plot(audits[0], "-o", "a.png", "--pipelines", "none"), "lazy")
    rejected(plot(*audits, "-o", "a.png", "--kind", "rows"), "rows")
    assert not list(tmp_path.glob("a.*"))
