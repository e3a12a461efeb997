"""Stop strings, found the slow and obvious way."""


def reference(text, strings, least=0):
    """The end by definition: the shortest beginning of the text that ends with one of them.

    It has more than `least` characters.
    """
    for length in range(least + 1, len(text) + 1):
        found = [one for one in strings if text[:length].endswith(one)]
        if found:
            longest = max(found, key=len)
            return longest, length - len(longest), length
    return None
