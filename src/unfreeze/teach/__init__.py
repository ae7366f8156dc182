"""L7, a second model beside the one that trains: a teacher, or what is compared with.

vocabulary.py   the contract: the same words under the same ids
chosen.py       which of these a run of distill has, and what it minimises
teacher.py      a checkpoint, a run, or the model itself with its adapters off, asked while training
same.py         whether two checkpoints are one model
store.py        what a teacher said, on disk: the likeliest words of each supervised token
coding.py       how such an entry is written
endpoint.py     a server's likeliest words of each token, checked; address.py says what a server's address is,
                client.py asks it, budget.py prices it, served.py writes them into the store
inside.py       the one way to a teacher's layers and to the corrector (docs/howto/teacher_layers.md: seldom
of use)
on_policy.py    steps on the student's own answers
answers.py      what a teacher writes, as rows for sft; chat.py asks a server for it
reference.py    the model as it was when training began, which a policy is compared with;
                kept.py keeps what it says of every answer

What is asked while training is a Second (job/second.py). It never trains.
"""
