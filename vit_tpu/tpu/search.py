"""The largest batch that fits, from few compilations."""

from __future__ import annotations

from collections.abc import Callable

from vit_tpu.tpu.report import Memory

LARGEST_BATCH = 65_536


def largest_batch(memory_of: Callable[[int], Memory], available: int, unit: int = 1) -> int:
    """Returns the largest batch per core that fits, 0 if none does.

    Memory grows almost in a straight line with the batch, so the line through the last two answers is tried first.
    The answer is exact below 128 images, then to within a 64th.

    Args:
      memory_of: compiles a batch size.
      available: bytes that a core has.
      unit: what the batch must divide by.
    """
    sizes: dict[int, int] = {}

    def fits(batch: int) -> bool:
        if batch not in sizes:
            memory = memory_of(batch)
            sizes[batch] = memory.total if memory.fits else max(memory.total, available + 1)
        return sizes[batch] <= available

    low, high = 0, max(8, unit)
    while fits(high):
        low, high = high, high * 4
        if high > LARGEST_BATCH:
            return low
    while high - low > max(unit, _step(low)):
        grid = max(unit, _step(low))
        middle = _between(sizes, low, high, available)
        middle = min(max(middle // grid * grid, low + grid), high - grid if high - grid > low else high - 1)
        middle = middle // unit * unit
        if middle <= low or middle >= high:
            break
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _step(batch: int) -> int:
    return max(1, 2 ** (max(batch, 1).bit_length() - 1) // 64)


def _between(sizes: dict[int, int], low: int, high: int, available: int) -> int:
    """The batch at which the line through the two ends reaches the memory; the middle if an end is not known."""
    if low not in sizes or sizes[high] <= sizes[low]:
        return (low + high) // 2
    share = (available - sizes[low]) / (sizes[high] - sizes[low])
    guess = low + int(share * (high - low))
    quarter = (high - low) // 8  # never creep along one end
    return min(max(guess, low + quarter), high - quarter)
