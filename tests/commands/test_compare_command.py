"""`unfreeze compare`: the page, the terminal and --json say the same about a real run and an altered copy of
it."""

import json
import shutil

from unfreeze import cli


def test_two_runs(run_dir, tmp_path, unfreeze_json, capsys):
    other = tmp_path / "other"
    shutil.copytree(run_dir, other, ignore=shutil.ignore_patterns("state", "adapter"))
    config = json.loads((other / "resolved_config.json").read_text())
    config["lora.rank"] = 64
    (other / "resolved_config.json").write_text(json.dumps(config))
    page = tmp_path / "pages" / "c.html"
    result = unfreeze_json("compare", run_dir, other, "--html", page)
    assert result["differences"] == {"lora.rank": ["2", "64"]} and [
        run["steps"] for run in result["runs"]
    ] == [3, 3]
    assert result["html"] == str(page) and "lora.rank" in page.read_text(encoding="utf-8")
    assert cli.main(["compare", str(run_dir), str(other), "--html", str(page)]) == 0
    said = capsys.readouterr().out
    assert "lora.rank" in said and f"{result['runs'][0]['loss_last']:.4f}" in said and str(page) in said
    assert cli.main(["compare", str(run_dir), str(tmp_path)]) == 2
    assert "events.jsonl is missing" in capsys.readouterr().err


def test_a_page_among_the_runs_is_passed_over(run_dir, tmp_path, unfreeze_json):
    """`runs/*` matches the page that the comparison before wrote. Control arm: another file is no run."""
    shutil.copytree(run_dir, tmp_path / "other", ignore=shutil.ignore_patterns("state", "adapter"))
    page = tmp_path / "compare-a-b.html"
    page.write_text("")
    result = unfreeze_json("compare", run_dir, tmp_path / "other", page, "--html", tmp_path / "c.html")
    assert len(result["runs"]) == 2
    assert cli.main(["compare", str(run_dir), str(tmp_path / "notes.txt")]) == 2
