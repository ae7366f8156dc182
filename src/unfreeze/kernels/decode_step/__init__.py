"""One generation step on a CPU as a list of operations that all cores work through without a wait in between.

program.py  the list: a table of addresses and sizes, recorded once per generation
team.py     the loop that every core runs over the table
dots.py     the products, in registers
"""
