"""Functions of rewards. Processes of their own read this file: it imports nothing, which of torch takes seconds."""


def longer(prompt, completion):
    return len(completion)


def sometimes(prompt, completion):
    return len(completion) if "1" in prompt else 0.0


def shorter(prompt, completion):
    return -len(completion) / 10
