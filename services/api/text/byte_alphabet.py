"""The alphabet of byte-level vocabularies: which byte each letter stands for.

Printable Latin-1 characters stand for themselves, the other bytes for U+0100 onward, in order.
"""


def byte_letters() -> dict[str, int]:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    return letters | {chr(0x100 + place): byte for place, byte in enumerate(others)}
