"""Four behaviours of reasoning, counted in a text by English phrases.

Source of the four: Gandhi et al. 2025, arXiv:2503.01307. The paper lets a language model count them; phrases
are a proxy that costs nothing. Its level means little: compare a run with itself, over its steps.

    verification       a result is checked: "let me check", "plugging 3 back in"
    backtracking       an approach is given up: "this does not work, let's try"
    subgoals           a problem is cut into steps: "first, we need to", "step 2:"
    backward chaining  from the goal to what it needs: "to reach 24 we need", "working backwards"
"""

from __future__ import annotations

import re

ME = r"(?:let me|let's|let us|i'll|i will|i should|we should|we can|i can)"
WE = r"(?:i|we|you)"
PATTERNS = {
    "verification": (
        rf"\b{ME} (?:quickly |just )?(?:double-?\s?check|re-?check|check|verify|confirm|test)\b",
        r"\b(?:to (?:verify|double-?\s?check|confirm)|verifying|sanity check|double-?\s?checking)\b",
        r"\bplug(?:ging)? .{0,20}?\bback\b",
        r"\b(?:does|do) (?:this|that|it|these|they) (?:hold|match|satisfy|work out|add up)\b",
    ),
    "backtracking": (
        r"\b(?:wait|hold on|hmm|no)[,.!:]{1,3} (?:that|this|but|let|actually|i|it|no)\b",
        r"\b(?:doesn't|does not|didn't|did not|won't|will not|cannot|can't) work\b",
        r"\b(?:this|that|which) (?:is|was|is still|seems|looks) (?:wrong|incorrect|not right|a dead end)\b",
        rf"\b{ME} try (?:again|another|a different|something else)\b",
        rf"\b{ME} (?:go back|start over|reconsider|rethink)\b",
        r"\bi (?:made|have made) an? (?:mistake|error)\b",
    ),
    "subgoals": (
        rf"\bfirst,? (?:{WE} (?:need|have|must|should|will|can)|{ME}|find|compute|calculate)\b",
        rf"\b{WE} first (?:need|have|must|find|compute|calculate)\b",
        rf"\b(?:next|then|after that|finally),? (?:{WE} (?:need|have|must|should|will|can)|{ME})\b",
        r"\bstep \d{1,3}\s?[:.)]",
        r"\b(?:break|split|divide) (?:it|this|that|them|the \w{1,20}) (?:down |up )?into\b",
    ),
    "backward chaining": (
        r"\bwork(?:ing)? backwards?\b",
        rf"\bto (?:get|reach|obtain|make|arrive at) [^.\n]{{1,60}}?\b{WE} (?:would )?(?:need|must|want)\b",
        r"\bstart(?:ing)? (?:from|with) the (?:end|goal|target|answer|result)\b",
        rf"\bwhat (?:do|would|must) {WE} need (?:to|for|so)\b",
        r"\bto get to a (?:multiple|factor|number)\b",
    ),
}
"""Behaviour -> patterns over text in lower case with straight apostrophes. All repetitions are bounded, so a
search takes time proportional to the text."""
NAMES = tuple(PATTERNS)
COMPILED = {name: re.compile("|".join(patterns)) for name, patterns in PATTERNS.items()}


def behaviours(text: str) -> dict[str, int]:
    """Behaviour -> number of phrases of it in the text; phrases do not overlap."""
    plain = text.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    return {name: sum(1 for _ in pattern.finditer(plain)) for name, pattern in COMPILED.items()}
