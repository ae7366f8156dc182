"""Runs `unfreeze demo --json` as a user would and holds its computed numbers against the promised thresholds."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    command = [str(Path(sys.executable).parent / "unfreeze"), "demo", "--json", "--out", str(Path(folder) / "demo")]
    started = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    wall = time.monotonic() - started
    if done.returncode != 0:
        sys.exit(f"demo: exit code {done.returncode}")
    result = json.loads(done.stdout.splitlines()[-1])
    report = (Path(folder) / "demo" / "report.html").stat().st_size

checks = {
    f"style before {result['style_before']:.1%} <= 5 %": result["style_before"] <= 0.05,
    f"style after {result['style_after']:.1%} >= 95 %": result["style_after"] >= 0.95,
    f"facts {result['facts_before']:.1%} -> {result['facts_after']:.1%}, within 3 points": result["facts_after"] >= result["facts_before"] - 0.03,
    f"facts before {result['facts_before']:.1%} >= 90 %": result["facts_before"] >= 0.90,
    f"loss {result['loss_first']:.3f} -> {result['loss_last']:.3f} falls": result["loss_last"] < result["loss_first"] / 2,
    f"seconds {result['seconds']:.0f} (process {wall:.0f}) <= 150": wall <= 150,
    f"report.html {report} bytes": report > 10_000,
}
for line, passed in checks.items():
    print(("ok    " if passed else "FAILED ") + line)
sys.exit(0 if all(checks.values()) else 1)
