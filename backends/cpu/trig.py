"""Sine and cosine of one float32 angle, in float64 arithmetic and without a library.

Comes in: an angle of any size that float32 angles have. Goes out: both as float64, right to float32's last place.
"""
from __future__ import annotations

import numpy as np

from .kernel import inline

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

# pi/2 in three parts. The first two have 22 bits, so that their products with a whole number below 2^31 are exact.
_A, _B, _C = (float.fromhex(x) for x in ("0x1.921fbp+0", "0x1.5110bp-22", "0x1.18469898cc517p-44"))
_ROUND = 1.5 * 2.0 ** 52                    # adding it rounds to a whole number
_f64, _i64 = np.float64, np.int64


@inline
def sincos(theta):
    """(sin, cos). Up to 2^31 quarter turns; beyond, float32 angles are many turns apart."""
    x = _f64(theta)
    turns = (x * 0.6366197723675814 + _ROUND) - _ROUND
    quadrant = _i64(turns) & 3
    r = ((x - turns * _A) - turns * _B) - turns * _C
    z = r * r
    s = r * (1 + z * (-1 / 6 + z * (1 / 120 + z * (-1 / 5040 + z * (1 / 362880 + z * (-1 / 39916800))))))
    c = 1 + z * (-1 / 2 + z * (1 / 24 + z * (-1 / 720 + z * (1 / 40320 + z * (-1 / 3628800 + z / 479001600)))))
    if quadrant & 1:
        s, c = c, -s
    return (-s, -c) if quadrant & 2 else (s, c)
