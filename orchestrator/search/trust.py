"""Whether a prediction of speed is worth starting from: does it order what was measured?"""

import numpy as np

from orchestrator.search.residuals import Floats

LEAST_LAUNCHES = 5
"""Measured speeds that it takes to give a prediction up."""
LEAST_CORRELATION = 0.3
"""Between predicted and measured log speed."""
CONTRAST = 0.4
"""Range of predicted log speed, over which the correlation says something: the search looks where speed is predicted
to be high, and among predictions that differ by no more than their own error, order is chance."""


def is_doubtful(predicted: Floats, measured: Floats) -> bool:
    """Whether enough trials of different predicted speeds show no order."""
    return len(measured) >= LEAST_LAUNCHES and _has_contrast(predicted) and not _orders(predicted, measured)


def wants_contrast(predicted: Floats, measured: Floats, running: Floats) -> bool:
    """Whether a trial of another predicted speed should be next: these say that the prediction is no guide, but differ
    too little to be sure. One launch before a prediction may be given up, so that it is in time."""
    return (
        len(measured) >= LEAST_LAUNCHES - 1
        and not _has_contrast(np.concatenate([predicted, running]))
        and not _orders(predicted, measured)
    )


def _has_contrast(predicted: Floats) -> bool:
    return len(predicted) > 1 and float(np.ptp(predicted)) >= CONTRAST


def _orders(predicted: Floats, measured: Floats) -> bool:
    if np.ptp(predicted) == 0 or np.ptp(measured) == 0:
        return False
    return float(np.corrcoef(predicted, measured)[0, 1]) >= LEAST_CORRELATION
