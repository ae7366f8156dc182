"""Personal data is found by form and check digit, replaced or dropped, and off unless asked for."""

from __future__ import annotations

import json

import pytest

from unfreeze.data.clean.personal import is_card, is_identity, replaced


@pytest.mark.parametrize(
    "text, expected",
    [
        ("write to ann.b+c@example.co.uk.", "write to <EMAIL>."),
        ("联系：zhang@example.cn，谢谢", "联系：<EMAIL>，谢谢"),
        ("from 8.8.8.8 to 127.0.0.1 and 10.0.0.1", "from <IP_ADDRESS> to 127.0.0.1 and 10.0.0.1"),
        ("version 1.2.3.400 or 2.1.0.5.1", "version 1.2.3.400 or 2.1.0.5.1"),
        ("电话13812345678，或 +86 138 1234 5678", "电话<PHONE>，或 <PHONE>"),
        ("call (555) 123-4567 now", "call <PHONE> now"),
        ("身份证11010519491231002X。", "身份证<ID_NUMBER>。"),
        ("card 4111 1111 1111 1111 expires", "card <CARD_NUMBER> expires"),
        ("ISBN 9783161484100, order 1234567890123", "ISBN 9783161484100, order 1234567890123"),
        ("in 1998 and 2023-11-02, pi is 3.14159265358979", "in 1998 and 2023-11-02, pi is 3.14159265358979"),
    ],
)
def test_what_has_a_form_is_replaced_and_other_numbers_are_not(text, expected):
    assert replaced(text)[0] == expected


ALARMS = {
    "first@example.com,second@example.com": "<EMAIL>,<EMAIL>",
    "用户zhang_san@126.com的邮箱": "用户<EMAIL>的邮箱",
    "+8613812345678": "<PHONE>",
    "0086-13812345678": "<PHONE>",
    "电话：010-62345678": "电话：<PHONE>",
    "0755-1234567。": "<PHONE>。",
    "400-800-8888": "<PHONE>",
    "+44 20 7946 0958": "<PHONE>",
    "+1-212-555-0187": "<PHONE>",
    "+49 (0)30 901820": "<PHONE>",
    "+33 1 23 45 67 89": "<PHONE>",
    "11010519491231002x": "<ID_NUMBER>",
    "8.8.8.8:53": "<IP_ADDRESS>:53",
    "http://93.184.216.34/index": "http://<IP_ADDRESS>/index",
    "4111-1111-1111-1111": "<CARD_NUMBER>",
}
NO_ALARMS = (
    "v1.2.3.4",
    "version 8.8.8.8 of the program",
    "section 3.2.1.4",
    "Chrome/120.0.6099.109",
    "192.168.1.1",
    "torch@2.3.1",
    "@decorator.call(x)",
    "user@localhost",
    "2024-01-15 10:30:00",
    "2023.11.02",
    "1998-2023",
    "$1,234,567.89",
    "¥13,800,138,000",
    "0.13812345678",
    "13812345678.5",
    "0x13812345678",
    "ISBN 978-3-16-148410-0",
    "timestamp 1638123456789",
    "order 13812345678901234",
    "110105194912310021",
    "doi 10.1038/s41586-020-2649-2",
    "555-1234",
)


@pytest.mark.parametrize("text", [*ALARMS, *NO_ALARMS])
def test_tricky_strings(text):
    assert replaced(text)[0] == ALARMS.get(text, text)


def test_check_digits():
    # the example of GB 11643-1999, and card numbers that payment companies publish for tests
    assert is_identity("11010519491231002X") and not is_identity("110105194912310021")
    assert is_card("4111111111111111") and is_card("378282246310005") and not is_card("4111111111111112")


ROWS = [{"text": "write to ann@example.org", "licence": "CC0"}, {"text": "nothing here", "licence": "MIT"}]


def test_it_is_off_by_default(cleaned):
    assert cleaned(ROWS)[1] == ROWS


def test_replaced_rows_are_counted_and_the_ledger_adds_up(cleaned, tmp_path):
    ledger, kept = cleaned(ROWS, personal={"enabled": True})
    assert kept == [{"text": "write to <EMAIL>", "licence": "CC0"}, ROWS[1]]
    assert ledger["replaced"] == {"email": 1}
    assert ledger["written"]["bytes"] == (tmp_path / "out" / "rows-00000.jsonl").stat().st_size


def test_a_document_can_be_dropped_and_its_example_shows_no_data(cleaned):
    ledger, kept = cleaned(ROWS, personal={"enabled": True, "action": "drop"})
    assert kept == [ROWS[1]]
    example = ledger["dropped"]["personal"]["examples"][0]
    assert example["why"] == "1 email" and "ann@" not in json.dumps(ledger)
