"""What repeated pairs come to: the mean of their ratios, and how sure it is."""

import statistics
from collections.abc import Sequence

from scipy.stats import t as student_t


def mean_interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The mean and the ends of its 95 % interval, Student's t. Raises StatisticsError with fewer than two ratios."""
    mean = statistics.mean(ratios)
    half = statistics.stdev(ratios) / len(ratios) ** 0.5 * float(student_t.ppf(0.975, len(ratios) - 1))
    return mean, mean - half, mean + half
