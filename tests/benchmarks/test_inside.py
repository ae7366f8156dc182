"""`unfreeze dev bench inside` on a tiny shape: every arm of every seed, from the same teacher, and the page."""

import json
import math

from benchmarks.cases.inside import ARMS, WORDS, Config, table
from benchmarks.cases.teach import ALONE
from unfreeze import cli


def test_every_arm_is_measured_and_written(tmp_path, capsys):
    few = ["--seeds", 2, "--steps", 2, "--teacher-steps", 2, "--documents", 40, "--tokens", 64, "--words", 20]
    page = tmp_path / "page.md"
    given = ["dev", "bench", "inside", "--json", *few, "--write", page]
    assert cli.main(list(map(str, given))) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["kl"]
    assert list(found) == ["the teacher", ALONE, WORDS, *ARMS]
    assert all(len(values) == 2 and all(map(math.isfinite, values)) for values in found.values())
    # what is compared changes what is learned
    assert len({values[0] for values in found.values()}) == len(found)
    text = page.read_text()
    assert "`unfreeze dev bench inside --seeds 2" in text and table(found) in text
    assert Config().seeds == 3
