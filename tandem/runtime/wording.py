"""Words of lines that people read."""


def counted(number: int, units: str) -> str:
    """Write how many there are of something.

    Example: counted(1, "problems") is "1 problem", and counted(1200, "problems") "1,200 problems".
    """
    return f"{number:,} {units.removesuffix('s') if number == 1 else units}"
