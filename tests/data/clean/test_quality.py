"""Each measure drops what it is for, and running text in English and Chinese passes all."""

from __future__ import annotations

import pydoc_data.topics

import pytest

from unfreeze.config.clean import Quality
from unfreeze.data.clean.document import Document
from unfreeze.data.clean.quality import QualityFilter

ENGLISH = (
    "The library reads a file that you name, and it writes what is left to a new folder. To be sure of the"
    " result, look at the ledger with the numbers of every reason.\n"
) * 3
CHINESE = (
    "这是一个关于数据清洗的例子。我们在这里读取文件，然后把剩下的内容写到新的文件夹里，有时也会删除重复的部分！\n"
    * 3
)


@pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=["english", "chinese"])
def test_running_text_passes(text):
    assert QualityFilter(Quality())(Document(text)) is None


BAD = {
    "word_length": "of a b the c d e f and g h i j to k l. " * 5,
    "symbols": "the tag #one and #two of #three to be #four that " * 5 + ".",
    "letters": "the 1200 3400 of 7800 9000 to 1234 and 5678. " * 5,
    "function_words": "Buy cheap shoes online today free delivery every order. " * 5,
    "bullets": "• the first of them and more.\n" * 20,
    "ellipses": "The start of the article and a few of its first words, but not to the end...\n" * 5,
    "punctuation": "Home and the news of today\nContact to be with us\n" * 10,
}
BAD_CHINESE = {
    "symbols": "今天的#热点#话题#在#了" * 20 + "。",
    "letters": "价格：１２３，４５６，７８９，０１２的在３４５６７８。" * 10,
    "function_words": "宁夏回族自治区农林科学院农作物研究所平罗县文化局。" * 10,
    "line_length": "首页\n新闻的。\n关于在。\n" * 20,
    "punctuation": "首页新闻的体育在财经娱乐科技汽车\n" * 10,
    "ellipses": "这是一篇文章的开头，在这里被截断了...\n" * 5,
}


@pytest.mark.parametrize("name", BAD)
def test_each_measure_drops_what_it_is_for(name):
    reason = QualityFilter(Quality())(Document(BAD[name]))
    assert reason is not None and reason.name == f"quality.{name}"


@pytest.mark.parametrize("name", BAD_CHINESE)
def test_each_measure_drops_what_it_is_for_in_chinese(name):
    reason = QualityFilter(Quality())(Document(BAD_CHINESE[name]))
    assert reason is not None and reason.name == f"quality.{name}"


def test_control_arm_the_measures_of_words_would_drop_chinese(monkeypatch):
    monkeypatch.setattr(Document, "by_characters", False)
    reason = QualityFilter(Quality())(Document(CHINESE))
    assert reason is not None and reason.name == "quality.word_length"


def test_an_ellipsis_of_chinese_prose_is_no_cut_snippet():
    assert (
        QualityFilter(Quality())(Document("他望着远方的山，什么也没有说，我不知道他在想什么……\n" * 3)) is None
    )


def test_most_pages_of_python_s_documentation_pass():
    look = QualityFilter(Quality())
    topics = [text for text in pydoc_data.topics.topics.values() if len(text.split()) >= 200]
    assert sum(look(Document(text)) is None for text in topics) >= 0.9 * len(topics)
