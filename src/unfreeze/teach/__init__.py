"""L7, a second model beside the trained one: a teacher, or a reference model.

vocabulary.py   the contract: the same token ids for the same tokens
chosen.py       the teacher and the objective of a distill run
teacher.py      a checkpoint, a run, or the model itself without its adapters, queried while training
store.py        a teacher's outputs on disk: the top-K tokens at each supervised token
coding.py       the encoding of such an entry
endpoint.py     a server's top tokens, checked; address.py validates a server's address, client.py sends
                requests, budget.py and ledger.py limit their cost, served.py fills the store
inside.py       the only access to a teacher's layers and to the corrector (docs/howto/teacher_layers.md:
                rarely useful)
on_policy.py    steps on the student's own answers
answers.py      a teacher's answers as rows for sft; chat.py requests them from a server
reference.py    the model as it was when training began, the reference of a policy;
                kept.py caches its log-probabilities

A model queried while training is a Second (second.py). It never trains.
"""
