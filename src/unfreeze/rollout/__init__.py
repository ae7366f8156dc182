"""L7, rollout: what answers are worth, and what the model talks with while it answers.

groups.py       advantages of a step's answers, from the rewards of their groups; the divisor of a step
routes.py       the experts that the sampler chose, as a batch carries them
like.py         the settings that compute what another trainer's default computes
"""
