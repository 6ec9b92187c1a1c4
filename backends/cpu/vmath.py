"""Elementary functions on f32x16, as polynomials: the same bits on every machine with the same lowering.

Errors are the largest seen over all floats of the range (tests/backends/cpu/test_simd.py measures them again).
Coefficients: Cephes single precision (exp, log, tanh), and the rational erf that Eigen and XLA share.
"""
from __future__ import annotations

from . import simd
from .kernel import inline

# mypy: disable-error-code="no-untyped-def, no-untyped-call"


@inline
def exp(x):
    """e^x, 1 ulp down to the subnormals; exp(-inf) is 0, overflow is inf, NaN stays."""
    magic = simd.splat_f32(12582912.0)                                     # 1.5 * 2^23: adding it rounds to an integer
    x = simd.select(x < -104.0, simd.splat_f32(-104.0), simd.select(x > 89.0, simd.splat_f32(89.0), x))
    shifted = simd.fma(x, simd.splat_f32(1.44269504088896341), magic)
    n = simd.as_i32(shifted) - simd.as_i32(magic)
    whole = shifted - magic
    r = simd.fma(whole, simd.splat_f32(-0.693359375), x)
    r = simd.fma(whole, simd.splat_f32(2.12194440e-4), r)
    y = simd.fma(r, simd.splat_f32(1.9875691500e-4), simd.splat_f32(1.3981999507e-3))
    y = simd.fma(y, r, simd.splat_f32(8.3334519073e-3))
    y = simd.fma(y, r, simd.splat_f32(4.1665795894e-2))
    y = simd.fma(y, r, simd.splat_f32(1.6666665459e-1))
    y = simd.fma(y, r, simd.splat_f32(5.0000001201e-1))
    y = simd.fma(y, r * r, r) + 1.0
    half = (n + 512 >> 1) - 256                                            # 2^n in two steps: n is -150 to 129
    return y * simd.as_f32(half + 127 << 23) * simd.as_f32(n - half + 127 << 23)


@inline
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + exp(-x))


@inline
def silu(x):
    """x / (1 + e^-x)."""
    return x / (1.0 + exp(-x))


@inline
def tanh(x):
    """2 ulp; tanh(+-inf) is +-1."""
    a = simd.absolute(x)
    z = x * x
    p = simd.fma(z, simd.splat_f32(-5.70498872745e-3), simd.splat_f32(2.06390887954e-2))
    p = simd.fma(p, z, simd.splat_f32(-5.37397155531e-2))
    p = simd.fma(p, z, simd.splat_f32(1.33314422036e-1))
    p = simd.fma(p, z, simd.splat_f32(-3.33332819422e-1))
    small = simd.fma(p * z, x, x)
    large = 1.0 - 2.0 / (exp(a + a) + 1.0)
    return simd.select(a < 0.625, small, simd.select(x < 0.0, -large, large))


@inline
def erf(x):
    """A few ulp; exactly 1 from 3.925 on, where gelu would multiply what is missing."""
    x = simd.select(x < -3.925, simd.splat_f32(-3.925), simd.select(x > 3.925, simd.splat_f32(3.925), x))
    z = x * x
    p = simd.fma(z, simd.splat_f32(-2.72614225801306e-10), simd.splat_f32(2.77068142495902e-08))
    p = simd.fma(p, z, simd.splat_f32(-2.10102402082508e-06))
    p = simd.fma(p, z, simd.splat_f32(-5.69250639462346e-05))
    p = simd.fma(p, z, simd.splat_f32(-7.34990630326855e-04))
    p = simd.fma(p, z, simd.splat_f32(-2.95459980854025e-03))
    p = simd.fma(p, z, simd.splat_f32(-1.60960333262415e-02))
    q = simd.fma(z, simd.splat_f32(-1.45660718464996e-05), simd.splat_f32(-2.13374055278905e-04))
    q = simd.fma(q, z, simd.splat_f32(-1.68282697438203e-03))
    q = simd.fma(q, z, simd.splat_f32(-7.37332916720468e-03))
    q = simd.fma(q, z, simd.splat_f32(-1.42647390514189e-02))
    return simd.select(simd.absolute(x) < 3.925, x * p / q, x / 3.925)


@inline
def gelu(x):
    """The tanh form: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    return 0.5 * x * (1.0 + tanh(0.79788456080286535587989211986876 * x * (1.0 + 0.044715 * x * x)))


@inline
def gelu_erf(x):
    """The exact form: x/2 (1 + erf(x / sqrt(2)))."""
    return 0.5 * x * (1.0 + erf(x * 0.70710678118654752440084436210484))


@inline
def gelu_quick(x):
    """x / (1 + e^(-1.702 x))."""
    return x / (1.0 + exp(-1.702 * x))


@inline
def log(x):
    """Natural logarithm, 1 ulp; log(0) is -inf, of a negative number NaN, of inf inf."""
    subnormal = x < 1.1754943508e-38
    scaled = simd.select(subnormal, x * 8388608.0, x)                      # 2^23
    bits = simd.as_i32(scaled) - 0x3F3504F3                                # mantissa to [sqrt(1/2), sqrt(2))
    e = simd.to_f32((bits >> 23) - simd.select(subnormal, simd.splat_i32(23), simd.splat_i32(0)))
    m = simd.as_f32((bits & 0x007FFFFF) + 0x3F3504F3) - 1.0
    p = simd.fma(m, simd.splat_f32(7.0376836292e-2), simd.splat_f32(-1.1514610310e-1))
    p = simd.fma(p, m, simd.splat_f32(1.1676998740e-1))
    p = simd.fma(p, m, simd.splat_f32(-1.2420140846e-1))
    p = simd.fma(p, m, simd.splat_f32(1.4249322787e-1))
    p = simd.fma(p, m, simd.splat_f32(-1.6668057665e-1))
    p = simd.fma(p, m, simd.splat_f32(2.0000714765e-1))
    p = simd.fma(p, m, simd.splat_f32(-2.4999993993e-1))
    p = simd.fma(p, m, simd.splat_f32(3.3333331174e-1))
    z = m * m
    y = simd.fma(e, simd.splat_f32(-2.12194440e-4), p * m * z) - 0.5 * z
    y = simd.fma(e, simd.splat_f32(0.693359375), m + y)
    nan = simd.splat_f32(float("nan"))
    y = simd.select(x == 0.0, simd.splat_f32(float("-inf")), simd.select(x >= 0.0, y, nan))
    return simd.select(x == float("inf"), x, y)
