"""KTO's reference point is of answers to other prompts: no prompt meets an answer to itself where that can be."""

from unfreeze.data import Example
from unfreeze.data.packing.answers import mismatched


def answer(prompt: int, said: int) -> Example:
    return Example([prompt, prompt, said], [0.0, 0.0, 1.0], chosen=3)


def test_a_prompt_meets_no_answer_to_itself_where_that_can_be():
    """Prompt p is answered by 10 p + i. One place before is the same prompt in 3 of 6: two places are needed."""
    examples = [answer(p, 10 * p + i) for p in (1, 2, 3) for i in range(2)]
    met = [(tokens[0], tokens[-1] // 10) for tokens in (list(e.tokens) for e in mismatched(examples))]
    assert [prompt for prompt, _ in met] == [1, 1, 2, 2, 3, 3]
    assert all(prompt != other for prompt, other in met)
    assert sorted(e.tokens[-1] for e in mismatched(examples)) == [10, 11, 20, 21, 30, 31]  # each answer once
    # different prompts: the one before, as TRL has it; one prompt alone cannot be helped
    assert [e.tokens[-1] for e in mismatched([answer(p, 10 * p) for p in (1, 2, 3)])] == [30, 10, 20]
    assert len(mismatched([answer(1, 10), answer(1, 11)])) == 2
