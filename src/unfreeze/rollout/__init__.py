"""Answers that the model samples, their rewards, and what training makes of them.

user_code, signature         a user's reward functions and their arguments
graders, pool, worker, child processes that run them, with limits
reward                       Graded: the reward of an answer, or the reason why it has none
groups                       rewards -> advantages
like                         presets of other trainers
routes                       the sampler's experts, replayed in training
"""
