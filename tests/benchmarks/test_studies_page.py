"""docs/measured/studies.md is made from benchmarks/results/studies."""

import json

from benchmarks import studies_page


def test_the_committed_page_is_that_of_the_committed_results():
    page = studies_page.ROOT / "docs" / "measured" / "studies.md"
    assert page.read_text(encoding="utf-8") == studies_page.page(studies_page.read())


def test_the_page_says_what_a_result_says(tmp_path):
    study = {
        "study": "wide_or_deep",
        "command": "unfreeze lab examples/lab/wide_or_deep.toml",
        "question": "Is wide better?",
        "sentence": "no difference: wide minus deep is -1 to 1 nats (3 seeds)",
        "cautions": ["Intervals: Student's t."],
        "head": ["arm", "loss"],
        "rows": [["deep", "2.1"], ["wide", "2.2"]],
        "date": "2026-11-27",
        "machine": "cpu-amx, 2 CPUs",
        "seconds": 90.0,
        "runs": 6,
    }
    (tmp_path / "wide_or_deep.json").write_text(json.dumps(study))
    page = studies_page.page(studies_page.read(tmp_path))
    assert (
        "| [Is wide better?](#wide-or-deep) | no difference: wide minus deep is -1 to 1 nats (3 seeds) |"
        in page
    )
    assert (
        "## wide or deep\n" in page and "| arm | deep | wide |\n|---|---|---|\n| loss | 2.1 | 2.2 |" in page
    )
    assert "2026-11-27, cpu-amx, 2 CPUs: 6 runs, 1.5 min." in page


def test_texts_end_no_cell_and_are_no_html(tmp_path):
    words = "a | b\n<script>x</script>"
    texts = {"study": "x", "command": "c", "question": words, "sentence": words, "date": "", "machine": ""}
    study = {**texts, "cautions": [words], "head": ["arm", words], "rows": [["a", words]]}
    page = studies_page.page([{**study, "seconds": 1.0, "runs": 1}])
    assert "<script" not in page and page.count("a \\| b &lt;script>x&lt;/script>") == 7
