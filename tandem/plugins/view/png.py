"""An SVG picture as PNG, by resvg (the extra `png`): light, on white, at twice its size.

It draws with the fonts of this machine, by the names that svg.py has.
"""

from tandem.plugins.view.svg import STYLE
from tandem.runtime.errors import UserError, not_installed

_LETTER = '<svg xmlns="http://www.w3.org/2000/svg" class="plot" width="20" height="20">'
_LETTER += f'<style>{STYLE}</style><text y="15">%s</text></svg>'


def to_png(svg: str) -> bytes:
    """Draw an SVG picture. Raises UserError without resvg_py, or without a font, as a text would be
    left out in silence."""
    try:
        from resvg_py import svg_to_bytes
    except ModuleNotFoundError:
        instead = "a name that ends in .svg"
        raise not_installed("resvg_py", "png", where="-o", instead=instead) from None
    letter, blank = (svg_to_bytes(svg_string=_LETTER % text) for text in ("A", ""))
    if letter == blank:
        raise UserError(
            "a PNG would have no text",
            found="no font on this machine that resvg knows",
            expected="DejaVu Sans, Liberation Sans, Noto Sans, Helvetica or Arial",
            next="apt-get install fonts-dejavu-core; or name a file that ends in .svg",
        )
    return svg_to_bytes(svg_string=svg, background="white", zoom=2.0)
