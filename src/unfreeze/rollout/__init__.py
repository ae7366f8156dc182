"""L7, rollout: what answers are worth, and what the model talks with while it answers.

user_code.py    a user's function or class by name, so that another process can make it: of a file or a
                module; notebook.py writes out one of a notebook
signature.py    the columns of a row that a function takes, checked before anything is generated
reward.py       Graded: a reward, its parts, or the named reason why there is none
graders.py      rewards of many answers, computed in processes that can be killed
environment.py  tools and several turns; held.py has the objects, in the graders' processes
tool_schema.py  a method as a tool; tool_calls.py reads the calls in an answer
turns.py        answers of several turns as tokens: the ids that are fed are those that are trained on
pool.py         these processes (worker.py), each with its deadline; child.py inside, confined by limits.py
"""
