"""`unfreeze report`: the page of a run, and its summary with the account of the data."""

from unfreeze import cli


def test_page_and_summary(run_dir, unfreeze_json, capsys):
    (run_dir / "report.html").unlink()
    result = unfreeze_json("report", run_dir)
    page = (run_dir / "report.html").read_text(encoding="utf-8")
    assert result["report"] == str(run_dir / "report.html") and "supervised share" in page
    assert any("18 rows" in line and "% supervised" in line for line in result["summary"])
    assert cli.main(["report", str(run_dir)]) == 0
    assert capsys.readouterr().out.splitlines() == [*result["summary"], f"report: {run_dir / 'report.html'}"]


def test_a_folder_without_a_run_is_said(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "events.jsonl is missing" in capsys.readouterr().err
