"""Words of errors and reports, for people."""


def pluralize(number: int, noun: str, form: str = "") -> str:
    """A number and what it counts: "1 message", "2 messages"; `form` is the number's own."""
    return f"{number:{form}} {noun}{'' if number == 1 else 's'}"
