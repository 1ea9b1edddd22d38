"""Alphabet of byte-level vocabularies: the byte that each letter of a token's spelling stands for.

Printable Latin-1 characters stand for themselves. The other bytes are written as U+0100 and the characters
after it, in order.
"""


def byte_letters() -> dict[str, int]:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    return letters | {chr(0x100 + place): byte for place, byte in enumerate(others)}
