"""Zero false alarms: clean runs under the guards raise none; control arm: a planted fault does. The command
runs all ten nightly; here is one, of packed experts in bf16."""

import pytest

from unfreeze import drill
from unfreeze.drill import clean_runs
from unfreeze.drill.clean_runs import RUNS, CleanRun, alarms_of
from unfreeze.drill.sandbox import ROWS, Sandbox


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory):
    return Sandbox(tmp_path_factory.mktemp("clean"))


def test_ten_runs_of_every_family_and_both_dtypes():
    assert len(RUNS) == 10 and {run.dtype for run in RUNS} == {"float32", "bfloat16"}
    assert {run.family.split("-")[0] for run in RUNS} >= {
        "llama",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "deepseek_v3",
        "tiny",
    }


@pytest.mark.parametrize(
    "run", [RUNS[8], pytest.param(RUNS[4], marks=pytest.mark.nightly)], ids=lambda run: run.title
)
def test_a_clean_run_raises_no_alarm(sandbox, run):
    # bfloat16 on a CPU without its units is slow, which is true and no alarm
    assert [alarm for alarm in alarms_of(run, sandbox) if "is slow here" not in alarm] == []


def test_control_arm_planted_faults_raise_alarms(sandbox, monkeypatch):
    monkeypatch.setattr(clean_runs, "ROWS", [*ROWS, ROWS[0], {"question": "frog " * 600, "answer": "Hmm."}])
    alarms = alarms_of(CleanRun("llama", "float32"), sandbox)
    assert any("are duplicates" in alarm for alarm in alarms) and any("0 of" in alarm for alarm in alarms)


def test_an_alarm_ends_the_command_with_1(sandbox, monkeypatch):
    monkeypatch.setattr(clean_runs, "RUNS", (RUNS[0],))
    monkeypatch.setattr(clean_runs, "alarms_of", lambda run, sandbox: ["planted"])
    result = drill.clean(sandbox, drill.Common(quiet=True))
    assert result["exit_code"] == 1 and result["alarms"] == ["llama in float32: planted"]
