"""Which kernel multiplies quantized weights with how many columns: the one place where that is decided.

Up to FEW columns the weights are read once for all of them, and that is all that counts. Beyond, tiles of int8 tensor cores. From
`LIBRARY` on it pays to unpack the weights to bfloat16 once for all columns and to let cuBLAS multiply. The last is a model of an
H200, not a measurement:

    unpacking costs a weight    (0.56 B read + 2 B written + 2 B read) / 4.3 TB/s    = 1.06 ps
    a column costs a weight     2 / 700 Tflop/s with bfloat16, 2 / 350 Top/s with the int8 tiles (half of what wgmma gives)

so that the library wins above 1.06 / (5.7 - 2.9) = 370 columns.
"""
from __future__ import annotations

FEW = 8                     # columns up to which weights are read once for all columns
NARROW = 32                 # columns of the smaller tiles
WIDE = 128                  # of the larger ones
BANDWIDTH = 4.3e12          # bytes per second
UNPACKED = 0.56 + 2 + 2     # bytes moved for each weight
INT8, BF16 = 350e12, 700e12
LIBRARY = int(UNPACKED / BANDWIDTH / (2 / INT8 - 2 / BF16)) // WIDE * WIDE + WIDE
PLAIN_LIBRARY = NARROW + 1  # weights of 16 bits need no unpacking: what is lost is that such runs are not recorded
LARGEST = 1 << 28           # bytes that unpacked weights may take
