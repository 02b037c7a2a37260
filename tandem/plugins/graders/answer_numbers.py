r"""A parser of numbers and units as answers write them: exact values, one name for each unit.

Nothing is evaluated: `2+3` is no number, while `3\times 10^8`, the way to write a large one, is.
Knows neither completions nor the right answer.

    python -c "from tandem.plugins.graders.answer_numbers import parse_number; \
        print(parse_number(r'v = 1\frac{1}{2} m/s'))"
"""

import re
from fractions import Fraction
from typing import NamedTuple

from tandem.plugins.graders.answer_spelling import normal, without_fonts

NUMBER_CHARS = 256  # longer is no number; it bounds the digits of every number below

# ---------------------------------------------------------------- units

# a unit and its other names
_NAMES = r"""
cm centimeter centimetre; mm millimeter millimetre; m meter metre; km kilometer kilometre kms
in inch; ft foot feet; yd yard; mi mile; h hour hr; min minute; s second sec; ms millisecond; d day
g gram gramme; kg kilogram kilo; mg milligram; lb pound; oz ounce
l liter litre; ml milliliter millilitre; gal gallon; month; unit
dollar \$ $ usd buck; euro € eur; gbp £; cent ¢; % percent; ° degree deg; rad radian
n newton; j joule; kj kilojoule; w watt; kw kilowatt; v volt; a ampere amp; k kelvin; pa pascal
kpa kilopascal; hz hertz; mol mole; c coulomb; mi/h mph; km/h kph kmh; °c celsius; °f fahrenheit
"""
_UNITS = {
    name: names.split()[0] for names in re.split("[;\n]", _NAMES.strip()) for name in names.split()
}
_BEFORE = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}
_AFTER = {"squared": "^2", "cubed": "^3", "per": "/"}
_AFTER |= {sign: sign for sign in ("/", "^", "2", "3", "-1", "-2")}
# Words that are not units: a second guess, a doubt, arithmetic, another number.
_NO_UNIT = re.compile(
    "a|am|an|and|answer|approximately|as|at|be|because|but|by|dozen|each|either|else|equals?|"
    "even|for|from|hence|hundred|i|if|into|is|it|less|maybe|minus|mod|modulo|more|nor|not|odd|of|"
    "off|or|over|perhaps|pi|plus|possibly|since|so|sqrt|than|that|then|therefore|times?|to|too|"
    "was|were|which|with|wrong|thousand|[mbtr]+illion|zero|one|two|three|four|five|six|seven|"
    "eight|nine|ten|eleven|twelve|half|halves|thirds?|quarters?|twice|double|dozens?|pairs?|"
    "scores?|gross|factorial|choose|remainder|rem|lakhs?|"
    r"crores?|power|root|squared|cubed|\w+(?:th|ths)"
)
_MAGNITUDES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALES = {  # quantity -> its units, in multiples of a common one
    "length": {"mm": 1, "cm": 10, "m": 1000, "km": 1000**2},
    "mass": {"mg": 1, "g": 1000, "kg": 1000**2},
    "volume": {"ml": 1, "l": 1000},
    "time": {"s": 1, "min": 60, "h": 3600},
    "money": {"cent": 1, "dollar": 100},
}
_UNIT_WORD = re.compile(r"[A-Za-zµ°%$€£¢]+|\\\$|[/^]|[23]|-[12](?![0-9])")


def parse_unit(text: str, spaced: bool = True) -> str | None:
    """Return the unit named by text, e.g. "km/h" for "kilometers per hour"; None for any other
    text.

    spaced: the unit stands apart from its number. Only then may it be one letter, or a longer word
    that no table has: "5 apples".
    """
    words = _UNIT_WORD.findall(text := re.sub(r"\\cdot|[{}.\s]+", " ", text))
    if not words or len(words) > 6 or _UNIT_WORD.sub("", text).strip():
        return None
    parts, power = list[str](), ""
    for word in map(str.lower, words):
        if word in _BEFORE:
            power = _BEFORE[word]
        elif word in _AFTER and parts:
            parts.append(_AFTER[word])
        else:
            forms = (word, word.removesuffix("s"), word.removesuffix("es"))
            known_form = next((form for form in forms if form in _UNITS), "")
            if not known_form and (not spaced or _NO_UNIT.fullmatch(word) or len(word) < 3):
                return None
            if known_form and not spaced and len(word) == 1 and word.isalpha():
                return None
            parts.append((_UNITS[known_form] if known_form else word.removesuffix("s")) + power)
            power = ""
    unit = " ".join(parts)
    unit = re.sub(r"(\w+) \^ -([12])", lambda m: f"/{m[1]}{'^2' * (m[2] == '2')}", unit)
    return unit.replace(" ", "")


# ---------------------------------------------------------------- numbers


class Number(NamedTuple):
    r"""A number as written, e.g. "x = -\frac{1}{2}\text{ cm}" is Number(Fraction(-1, 2), False,
    "x", "cm")."""

    value: Fraction
    percent: bool
    name: str
    unit: str


_UNSIGNED = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?"
_PLAIN = re.compile(rf"([+-]?{_UNSIGNED})")
_SLASH = re.compile(rf"([+-]?{_UNSIGNED})/([+-]?{_UNSIGNED})")
_FRAC = re.compile(rf"([+-]?)\\frac\{{([+-]?{_UNSIGNED})\}}\{{([+-]?{_UNSIGNED})\}}")
_MIXED = re.compile(r"([+-]?)([0-9]+) ?(?:\\frac\{([0-9]+)\}\{([0-9]+)\}|(?<= )([0-9]+)/([0-9]+))")
_POWER_OF_TEN = re.compile(
    rf"([+-]?)(?:({_UNSIGNED}) ?(?:\\times|\\cdot|\*|x) ?)?10\^\{{?([+-]?[0-9]{{1,3}})\}}?"
)
_REPEATING = re.compile(r"([+-]?)([0-9]*)\.([0-9]{0,20})\\(?:overline|bar)\{([0-9]{1,20})\}")
_LETTERS = r"(?:[A-Za-z]'{0,2}|\\[a-z]+)(?:_?\{?[A-Za-z0-9]{1,16}\}?)?"
_NAME = re.compile(
    rf"({_LETTERS}(?:\([a-z]\))?|\({_LETTERS}(?:, ?{_LETTERS})+\)"
    r"|\\(?:vec|hat|bar|overline)\{\w+\})=(.+)"
)
# behind a name: "10/2=5"
_CHAIN = re.compile(r"(?:\\(?:frac|times|cdot|sqrt)|[^A-Za-z,;])*=([^=]+)")
_MEASURED = re.compile(r"(.*?[0-9.})%])( ?)(?![eE][+-]?[0-9])((?:[A-Za-zµ°€£¢]|\\\$).*)")
_CURRENCY = re.compile(r"([+-]?)(\\\$|[$€£]|USD|US\\\$) ?([+-]?[0-9.].*)")


def split_name(text: str) -> tuple[str, str]:
    """Split off the name before an equals sign, e.g. "x" and "5" of "x=5"; no name is ""."""
    match = _NAME.fullmatch(text)
    return (match[1], match[2]) if match else ("", text)


def parse_number(text: str) -> Number | None:
    r"""Read text as a number; None for any other text, or more than NUMBER_CHARS.

    Integers, decimals, `1,000`, `1e-5`, `3\times 10^8`, `a/b`, `\frac{a}{b}`, `1\frac{1}{2}`,
    `0.\overline{3}`, with a sign, parentheses, `%`, `x =`, a currency before it, a unit behind it.
    """
    text = normal(text)
    if len(text) > NUMBER_CHARS:
        return None
    name, text = split_name(without_fonts(_unwrapped(text), r" \1 ").strip())
    if name and (chain := _CHAIN.fullmatch(text)):
        text = chain[1]
    unit, text = _split_unit(_unwrapped(re.sub(" +", " ", text.replace(r"\approx", "")).strip()))
    percent = unit == "%" or text.endswith("%")
    value = _fraction(_unwrapped(text.removesuffix("%").strip()))
    return None if value is None else Number(value, percent, name, "" if percent else unit)


def _unwrapped(text: str) -> str:
    """Remove one pair of brackets around all of a text."""
    match = re.fullmatch(r"\(([^()]*)\)|\\\{([^{}]*)\\\}|\{([^{}]*)\}", text)
    return text if match is None else match[match.lastindex or 0].strip()


def _split_unit(text: str) -> tuple[str, str]:
    if match := _CURRENCY.fullmatch(text):
        currency = match[2].lower() if match[2] == "USD" else match[2].lower().removeprefix("us")
        return _UNITS[currency], match[1] + match[3]
    match = _MEASURED.fullmatch(text)
    if match is None:
        return "", text
    words = match[3].split()
    if words[0].lower() in _MAGNITUDES and (scale := _fraction(match[1])) is not None:
        value = scale * _MAGNITUDES[words[0].lower()]
        unit = parse_unit(" ".join(words[1:])) if words[1:] else ""
        return ("", text) if unit is None else (unit, f"{value.numerator}/{value.denominator}")
    unit = parse_unit(match[3], bool(match[2]))
    return ("", text) if unit is None else (unit, match[1])


_IN_PROSE = re.compile(rf"(?<![\w.,/])[+-]?{_UNSIGNED}(?:/{_UNSIGNED})?%?")


def written_numbers(text: str) -> list[str]:
    """Find the numbers in a text, for parse_number: "2" and "-3.5" of "2 cats and -3.5 dogs."."""
    return _IN_PROSE.findall(re.sub(r"[−–]", "-", text))


def _fraction(text: str) -> Fraction | None:
    if match := _PLAIN.fullmatch(text):
        return _decimal(match[1])
    if match := _SLASH.fullmatch(text):
        return _ratio("", match[1], match[2])
    if match := _FRAC.fullmatch(text):
        return _ratio(match[1], match[2], match[3])
    if match := _MIXED.fullmatch(text):
        part = _ratio("", match[3] or match[5], match[4] or match[6])
        return None if part is None else (Fraction(match[2]) + part) * _sign(match[1])
    if match := _POWER_OF_TEN.fullmatch(text):
        return _sign(match[1]) * _decimal(match[2] or "1") * Fraction(10) ** int(match[3])
    if match := _REPEATING.fullmatch(text):
        fixed = Fraction(f"{match[2] or 0}.{match[3] or 0}")
        repeated = Fraction(int(match[4]), 10 ** len(match[4]) - 1)
        return _sign(match[1]) * (fixed + repeated / 10 ** len(match[3]))
    return None


def _sign(sign: str) -> int:
    return -1 if sign == "-" else 1


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


def _ratio(sign: str, above: str, below: str) -> Fraction | None:
    denominator = _decimal(below)
    return _sign(sign) * _decimal(above) / denominator if denominator else None


def same_number(one: Number, other: Number) -> bool:
    """Compare values. A name or a unit may be left out, but not differ, nor may quantities.

    50% is 0.5, and is 50 if the question asked for a percentage. 0.5% is not 0.5, which may be a
    share.
    """
    if one.name and other.name and one.name != other.name:
        return False
    if one.unit and other.unit and one.unit != other.unit:
        return any(
            {one.unit, other.unit} <= units.keys()
            and one.value * units[one.unit] == other.value * units[other.unit]
            for units in _SCALES.values()
        )
    if one.percent == other.percent:
        return one.value == other.value
    percent, plain = (one.value, other.value) if one.percent else (other.value, one.value)
    return percent / 100 == plain or (percent == plain and abs(plain) > 1)


# ---------------------------------------------------------------- other bases

_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9}
_BASES |= {"ten": 10, "twelve": 12, "sixteen": 16}
_BASES |= {"binary": 2, "octal": 8, "decimal": 10, "hexadecimal": 16, "hex": 16}
_BASED = re.compile(
    r"(-?)\(?(0x)?([0-9A-Fa-f]+)\)?(?:_\{?(\w+)\}?| ?\(?(?:in )?(?:base[- ])?(\w+)\)?)?"
)


def parse_based(text: str) -> tuple[str, int] | None:
    """Split a number into digits and base, e.g. ("-1f", 16) for "-1F_{16}"; 0 if no base is
    named."""
    match = _BASED.fullmatch(without_fonts(normal(text)).replace("{", "").replace("}", ""))
    if match is None:
        return None
    named = (match[4] or match[5] or "").lower()
    base = int(named) if named.isdigit() and len(named) < 3 else _BASES.get(named, 0)
    base = 16 if match[2] else base
    return (match[1] + match[3].lower(), base) if base or not named else None
