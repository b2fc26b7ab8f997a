"""Arrays that a compiled function finds by one address.

To pass an array takes about a tenth of a microsecond, to pass a number far less. So what is called many times with the
same arrays gets the address of a list of them: three words for each, its address, lines and columns.
"""

import numpy as np
from numpy.typing import NDArray

WORDS = 3  # of each array


class Arrays:
    """Some contiguous arrays of two dimensions, of 8 bytes an entry, which are kept as long as this is."""

    def __init__(self, *arrays: NDArray[np.float64] | NDArray[np.int64]) -> None:
        assert all(array.ndim == 2 and array.itemsize == 8 and array.flags.c_contiguous for array in arrays)
        self.kept = arrays
        self._words = np.array([(array.ctypes.data, *array.shape) for array in arrays], np.int64)
        self.address = self._words.ctypes.data
