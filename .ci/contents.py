"""python .ci/contents.py SDIST WHEEL: both hold src/unfreeze, whole and nothing else, and are small."""

import sys
import tarfile
import zipfile
from pathlib import Path

LARGEST = 20_000_000  # bytes
SOURCE = Path(__file__).resolve().parents[1] / "src"

files = {
    path.relative_to(SOURCE).as_posix()
    for path in (SOURCE / "unfreeze").rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
}
failures = 0
for name in sys.argv[1:]:
    if name.endswith(".whl"):
        with zipfile.ZipFile(name) as wheel:
            held = {path for path in wheel.namelist() if ".dist-info/" not in path}
    else:
        with tarfile.open(name) as sdist:
            inner = (member.name.partition("/")[2] for member in sdist if member.isfile())
            held = {path.removeprefix("src/") for path in inner if path.startswith("src/unfreeze/")}
    size = Path(name).stat().st_size
    checks = {
        f"{size / 1e6:.1f} MB, at most {LARGEST / 1e6:.0f}": size <= LARGEST,
        f"{len(held):,} files, missing: {sorted(files - held)[:3]}": files <= held,
        f"not in the source: {sorted(held - files)[:3]}": held <= files,
    }
    failures += sum(not passed for passed in checks.values())
    for line, passed in checks.items():
        print(f"{'ok     ' if passed else 'FAILED '} {Path(name).name}: {line}")
sys.exit(failures > 0)
