"""A reward by its name: of a file, a module, the program itself, a notebook; else refused with the remedy."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from unfreeze.core.errors import ConfigError
from unfreeze.data.rows.asked import asked_from_dict
from unfreeze.rollout.graders import Graders
from unfreeze.rollout.notebook import written_out
from unfreeze.rollout.user_code import user_code

ROW = asked_from_dict({"question": "?"}, 1)


class Constant:
    def __call__(self, p, c):
        return 1.0


@pytest.fixture
def my(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(
        "from beside import BASE\ndef reward(p, c): return BASE\ndef two(p, c): return 2\n"
    )
    (tmp_path / "beside.py").write_text("BASE = 1.0\n")
    return tmp_path / "my.py"


def test_functions_of_a_file_and_what_lies_beside_it(my):
    assert [(code.names, code.path) for code in user_code("my.py")] == [(("reward",), str(my))]
    with Graders("my.py:reward,two", count=1) as graders:
        assert graders.grade([(ROW, "")])[0].parts == {"reward": 1.0, "two": 2.0}


@pytest.mark.parametrize(
    ("given", "message", "remedy"),
    [
        ("none.py", "there is no file none.py in ", "--reward FILE.py"),
        ("my.yp", "is not a Python file", "--reward my.py"),
        ("mi.py", "; nearest: 'my.py'", ""),
        ("broken.py", "reward: broken.py, line 2: ", "python broken.py"),
        ("nul.py", "reward: nul.py: source code string cannot contain null bytes", ""),
        ("latin.py", "reward: latin.py is not Python: ", ""),
        ("empty.py", "reward: empty.py is empty", "def reward(prompt, completion, **row)"),
        ((), "reward is empty", ""),
        (lambda p, c: 1.0, "reward is a lambda; graders run in processes", "with def at the top"),
        (Constant(), "reward is an object", ""),
    ],
)  # fmt: skip
def test_what_is_no_function_of_a_file_is_one_line(my, given, message, remedy):
    my.with_name("broken.py").write_text("def reward(p, c):\n    return 1 +\n")
    my.with_name("nul.py").write_text("x = 1\0")
    my.with_name("latin.py").write_bytes(b"# \xe9\n")
    my.with_name("empty.py").write_text("\n")
    with pytest.raises(ConfigError) as refused:
        user_code(given)
    assert message in refused.value.message and remedy in refused.value.next
    assert "\n" not in refused.value.message


def top(prompt, completion):
    return 3.0


def test_a_function_of_a_module_and_one_inside_another():
    with Graders(top, count=1) as graders:
        assert graders.grade([(ROW, "")])[0].reward == 3.0

    def inner(prompt, completion):
        return 1.0

    with pytest.raises(ConfigError, match="defined inside a function"):
        user_code(inner)


PROGRAM = """
from unfreeze.rollout.graders import Graders
from unfreeze.data.rows.asked import asked_from_dict

def my_reward(prompt, completion):
    return len(completion)

{guard}
with Graders(my_reward, count=1) as graders:
    print(graders.grade([(asked_from_dict({{"question": "?"}}), "four")])[0].reward)
"""


def test_a_function_of_the_program_itself(tmp_path):
    """As with every pool of processes, the program is read again: without the guard that is said."""
    answers = {}
    for guard in ('if __name__ != "__main__": raise SystemExit', ""):
        file = tmp_path / "program.py"
        source = PROGRAM.format(guard="if __name__ == '__main__':" if guard else "")
        if guard:
            head, tail = source.split("if __name__ == '__main__':\n")
            source = (
                head + "if __name__ == '__main__':\n" + "\n".join(f"    {line}" for line in tail.splitlines())
            )
        file.write_text(source)
        answers[bool(guard)] = subprocess.run(
            [sys.executable, file], capture_output=True, text=True, check=False
        )
    assert answers[True].stdout == "4.0\n", answers[True].stderr
    assert answers[False].returncode and 'if __name__ == "__main__":' in answers[False].stderr


CELLS = """
import math, os.path
import re
from collections import Counter
WORDS = {"yes": 1.0, "no": [0.5, None]}
DIGITS = re.compile(r"\\\\d+", re.I)
def helper(text):
    return Counter(text)["a"] + WORDS["yes"] + len(DIGITS.findall(text))
class Scale:
    by = 2.0
def cell_reward(prompt, completion, weight=WORDS["yes"]):
    return math.floor(helper(completion)) * Scale.by * weight + len(os.path.basename("a/bc"))
"""


def test_a_function_of_a_notebook_is_written_out_with_all_it_uses(tmp_path):
    """The text defines it anew, alone: equal to the function of the notebook."""
    script = tmp_path / "notebook.py"
    script.write_text(
        "import linecache, sys\n"
        f"cells = {CELLS.replace(chr(92) * 2, chr(92))!r}\n"
        "linecache.cache['<cell>'] = (len(cells), None, cells.splitlines(True), '<cell>')\n"
        "del sys.modules['__main__'].__file__\n"
        "exec(compile(cells, '<cell>', 'exec'))\n"
        "from unfreeze.rollout.user_code import user_code\n"
        "(code,) = user_code(cell_reward)\n"
        "apart = {}\n"
        "exec(code.text, apart)\n"
        "text = 'a1 b22 aa'\n"
        "print(apart['cell_reward'](0, text), cell_reward(0, text), code.names, code.path)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.stdout == "14.0 14.0 ('cell_reward',) <notebook>\n", done.stderr


MODEL = object()


def uses_a_live_object(prompt, completion):
    return MODEL is None


def test_what_lives_in_this_process_only_is_named():
    with pytest.raises(ConfigError, match="uses MODEL, a object that lives in this process only"):
        written_out(uses_a_live_object, "reward")
    text = written_out(top, "reward")
    assert re.search(r"^def top", text, re.MULTILINE)
