"""A calculator as a tool, and a reward for a last turn that states the row's answer.

unfreeze grpo --model MODEL --data sums.jsonl --env examples/environments/calculator.py:Calculator \
    --reward examples/environments/calculator.py

{"prompt": "What is 12 + 34?", "answer": 46}
"""

import ast
import operator
import re

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
LONGEST = 200  # characters of an expression


class Calculator:
    def reset(self, **row) -> None:
        pass

    def calculate(self, expression: str) -> str:
        """Calculate an expression.

        Args:
            expression: numbers with + - * / and brackets
        """
        if len(expression) > LONGEST:
            raise ValueError(f"an expression has at most {LONGEST} characters")
        return f"{value(ast.parse(expression.strip(), mode='eval').body):.12g}"


def reward(prompt: str, completion: str, answer: float) -> float:
    numbers = re.findall(r"-?\d+(?:\.\d+)?", completion)
    return float(bool(numbers) and float(numbers[-1]) == float(answer))


def value(node: ast.expr) -> float:
    """Return the value of an expression of numbers."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](value(node.left), value(node.right))
    raise ValueError("only numbers with + - * / and brackets")
