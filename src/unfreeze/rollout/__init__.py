"""Answers that the model samples, their rewards, and what training makes of them.

prompts, rollouts            rows to answer; the source of a run's steps
sampled                      an answer as a step keeps it
user_code, signature         a user's reward functions and their arguments
graders, pool, worker, child processes that run them, with limits
reward                       Graded: the reward of an answer, or the reason why it has none
groups                       rewards -> advantages
like                         presets of other trainers
routes                       the sampler's experts, replayed in training
environment, held, tools     environments with tools, of several turns
turns                        answers of several turns, at the level of tokens
"""
