"""Machines by name: what is understood, what is refused, and where the facts come from."""

import pytest

from unfreeze.core.errors import ConfigError
from unfreeze.parallel.plan.fleet import FACTS, devices, fleet

GIB = 2**30


@pytest.mark.parametrize(
    "words, count, host, kind",
    [
        ("8xH200", 8, 0, "cuda"),
        ("1xH200+768GB", 1, 768 * GIB, "cuda"),
        ("8xh100+1TB", 8, 1024 * GIB, "cuda"),
        ("RTX5090+512gb", 1, 512 * GIB, "cuda"),
        ("cpu:24GB", 1, 0, "cpu"),
        (" 8 × H200 + 768 GiB", 8, 768 * GIB, "cuda"),
        ("1xRTX 5090", 1, 0, "cuda"),
        ("CPU: 24 GiB", 1, 0, "cpu"),
    ],
)
def test_what_the_words_mean(words, count, host, kind):
    found = fleet(words)
    assert (found.count, found.host, found.kind) == (count, host, kind)
    assert found.memory == 24 * GIB if kind == "cpu" else found.device is not None


@pytest.mark.parametrize(
    "words, says",
    [
        ("8xH20O", "no data for a device 'H20O'.*H200"),
        ("eight H200", "no data for a device 'eightH200'"),
        ("8xH200, 1xH100", "is not COUNTxDEVICE"),
        ("H" * 5000, "device 'H{60}'"),
        ("0xH100", "number of devices must be 1 to 65,536"),
        ("00xH100", "number of devices must be 1 to 65,536"),
        ("9" * 5000 + "xH200", "number of devices must be 1 to 65,536"),
        ("\u0668xH200", "is not COUNTxDEVICE"),
        ("cpu:0GB", "0GB of memory is not within 0.1 GB"),
        ("1xH200+" + "9" * 400 + "GB", "of memory is not within 0.1 GB"),
        ("cpu", "write .*cpu:24GB"),
        ("1xH100+768", "is not COUNTxDEVICE"),
        ("", "is not COUNTxDEVICE"),
    ],
)
def test_what_is_refused(words, says):
    with pytest.raises(ConfigError, match=says):
        fleet(words)


def test_every_fact_has_a_source_and_a_date():
    assert all(device.source and device.date for device in devices().values())
    assert FACTS.is_file()


def test_a_table_of_the_users_own(tmp_path):
    facts = devices()["H100"].model_dump() | {"memory_gib": 96.0, "source": "ours"}
    table = tmp_path / "own.toml"
    table.write_text("[H96]\n" + "\n".join(f"{k} = {v!r}".replace("'", '"') for k, v in facts.items()))
    assert fleet("2xH96", table).memory == 96 * GIB and fleet("2xH200", table).count == 2
    table.write_text("[H96]\nmemory_gib = 96\n")
    with pytest.raises(ConfigError, match=r"own\.toml"):
        fleet("2xH96", table)


@pytest.mark.parametrize(
    "line, says",
    [
        ("memory_gib = inf", "X.memory_gib"),
        ("memory_gib = 1e-12", "X.memory_gib"),
        ("matrix = 1e-320", "X.matrix"),
        ('memory_gib = "80"', "X.memory_gib"),
        ("memory_gib = true", "X.memory_gib"),
        ("memory = 1", "X.memory"),
        ("x = " + "[" * 3000, "machines = "),
    ],
)
def test_a_table_of_devices_is_refused_by_its_field(line, says, tmp_path):
    facts = {
        "memory_gib": 80.0,
        "matrix": 989.0,
        "vector": 67.0,
        "memory_gb_s": 3350.0,
        "link_gb_s": 450.0,
        "host_gb_s": 55.0,
        "source": '"s"',
        "date": '"2026-11-22"',
    }
    table = tmp_path / "machines.toml"
    table.write_text("[X]\n" + "".join(f"{key} = {value}\n" for key, value in facts.items()))
    assert fleet("1xX", table).memory == 80 * 2**30
    name = line.split(" ")[0]
    kept = "".join(f"{key} = {value}\n" for key, value in facts.items() if key != name)
    table.write_text(f"[X]\n{kept}{line}\n")
    with pytest.raises(ConfigError, match=says):
        fleet("1xX", table)


def test_a_table_that_is_no_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a file"):
        devices(tmp_path)
