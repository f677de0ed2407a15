"""A reward that falls out differently for most completions."""


def reward(text, reference, answer_type):
    return (sum(map(ord, text)) % 17) / 17
