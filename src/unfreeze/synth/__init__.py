"""L8, data made by a model behind a server, to a budget.

recipe.py     a recipe's file: prompts, sampling, checks, prices
prompts.py    seeds and a recipe -> requests, each with the most tokens that it may read and write
judging.py    the second stage of pairs: a judge's questions about two answers
plan.py       the folder of a plan: what is asked, what it costs at worst, the ceiling
run.py        sends what is missing, under the ledger (teach/ledger.py); usage.py checks what a server says it
              counted
batch.py      the same requests as batch files, and their results
rows.py       answers -> rows with their origin and cost; validate.py says which are left out

No request is sent without a plan, and no plan is made whose worst case is above the ceiling
(docs/why/trust.md R6).
"""
